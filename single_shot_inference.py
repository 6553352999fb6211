"""Answers one prompt with a DeepSeek-V4 checkpoint: load, prefill, decode, text as it is produced,
one summary line.
"""

import os
import signal
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    # Importing torch takes seconds: a signal during it ends as quietly as later.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda number, _: os._exit(128 + number))
    for library in ("torch", "numpy", "safetensors", "tokenizers"):
        if find_spec(library) is None:
            what = f"error: {sys.executable} has no {library}"
            print(f"{what}: `make demo` installs it for .venv/bin/python", file=sys.stderr)
            sys.exit(2)

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from dsv4 import Engine
from dsv4.cli.arguments import gpu_bytes, parse_arguments
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults
from dsv4.cli.job import Job, Outcome, prepare
from dsv4.cli.log_lines import log_lines
from dsv4.cli.report import report, report_plan
from dsv4.cli.stream import TokenText, make_printer
from dsv4.cli.trace import check_trace, traced
from dsv4.command.program import EXIT_OK, command, run_program
from dsv4.command.progress import GIGABYTES, KERNELS, TOKENS, ProgressBar, StatusLine
from dsv4.command.signals import stop_code
from dsv4.command.streams import say, silence_stdout
from dsv4.config import layer_kinds
from dsv4.measure.graph_profile import profile_decoder
from dsv4.measure.op_profile import OpProfile


def load(job: Job, outcome: Outcome, show_bars: bool) -> Engine:
    """The engine, which enters ``outcome``; its eager steps are observed where their profile is
    wanted.
    """
    started = time.perf_counter()
    with (
        ProgressBar("compile", KERNELS, sys.stderr, show_bars) as compiling,
        ProgressBar("read   ", GIGABYTES, sys.stderr, show_bars) as reading,
        ProgressBar("pack   ", GIGABYTES, sys.stderr, show_bars) as packing,
    ):
        engine = Engine.load(
            job.arguments.model,
            job.engine_config,
            reading,
            compiling=compiling,
            packing=packing,
        )
    outcome.engine = engine
    outcome.load_seconds = time.perf_counter() - started
    if job.arguments.profile and engine.decoder is None:
        profile = OpProfile(engine.state.devices, layer_kinds(engine.config))
        engine.steps.observer = profile
        outcome.profile = profile
    return engine


def generate(job: Job, outcome: Outcome) -> None:
    """Loads the model and streams the answer to stdout; ``outcome`` is filled as it goes."""
    arguments = job.arguments
    limit_cpu_threads(job.model_config)
    show_bars = sys.stderr.isatty() and not (arguments.quiet or arguments.verbose)
    engine = load(job, outcome, show_bars)

    text = TokenText(job.tokenizer, arguments.stop)
    status = StatusLine(sys.stderr, show_bars)
    printer = make_printer(sys.stdout, job.prompt.thinking_mode, job.prompt.tools, status)
    stops = frozenset() if arguments.ignore_eos else job.eos_token_ids
    try:
        with (
            ProgressBar("prefill", TOKENS, sys.stderr, show_bars) as bar,
            traced(job, engine) as watch,
        ):
            bar(0, len(job.prompt.token_ids))
            tokens = engine.generate(
                job.prompt.token_ids, arguments.max_tokens, job.sampling, stops, bar, watch
            )
            with closing(tokens):
                for token in tokens:
                    bar.erase()
                    if isinstance(outcome.profile, OpProfile):
                        outcome.profile.next_phase("decode")
                    outcome.token_ids.append(token)
                    if token not in job.eos_token_ids:
                        printer.feed(text.push(token))
                    outcome.stop_string = text.stop_string
                    if text.stop_string is not None:
                        break
        assert engine.last_run is not None
        stopped = outcome.stop_string is not None
        outcome.finish_reason = "stop" if stopped else engine.last_run.finish_reason
    finally:
        printer.feed(text.finish())
        printer.finish(outcome.complete)


def run(arguments: argparse.Namespace) -> int:
    """The whole job; returns the exit code."""
    job = prepare(arguments)
    check_trace(arguments, job.model_config)
    plan = partial(Engine.plan, arguments.model, job.engine_config, gpu_bytes(arguments))
    if arguments.plan:
        report_plan(job, plan())
        return EXIT_OK
    if arguments.gpus > 1 and not arguments.quiet:
        say(str(plan()))
    outcome = Outcome()
    exit_code = EXIT_OK
    try:
        with device_faults(plan):
            generate(job, outcome)
            # Captured graphs have no calls to time: they are looked at when the answer is complete.
            if (
                arguments.profile
                and outcome.engine is not None
                and outcome.engine.decoder is not None
            ):
                outcome.profile = profile_decoder(outcome.engine, outcome.engine.decoder)
    except KeyboardInterrupt as stop:
        exit_code = stop_code(stop)
    except BrokenPipeError:
        silence_stdout()  # The reader has seen enough, which is no error.
    report(job, outcome)
    return exit_code


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command; docs/commands.md has its exit codes."""
    arguments = parse_arguments(argv)
    with log_lines(sys.stderr, arguments.verbose):
        return run(arguments)


if __name__ == "__main__":
    run_program(main)
