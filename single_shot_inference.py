"""Answers one prompt with a DeepSeek-V4 checkpoint: load, prefill, decode, text as it is produced,
one summary line.
"""

import signal
import sys

if __name__ == "__main__":
    # Importing torch takes seconds: Ctrl-C during it ends as quietly as later.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))

import argparse
import io
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NoReturn

from dsv4 import Engine, UserError
from dsv4.cli.arguments import gpu_bytes, parse_arguments
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults, user_message
from dsv4.cli.job import Job, Outcome, prepare
from dsv4.cli.log_lines import log_lines
from dsv4.cli.progress import GIGABYTES, KERNELS, TOKENS, ProgressBar
from dsv4.cli.report import report
from dsv4.cli.stream import TokenText, make_printer
from dsv4.config import layer_kinds
from dsv4.measure.graph_profile import profile_decoder
from dsv4.measure.op_profile import OpProfile

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def load(job: Job, outcome: Outcome, show_bars: bool) -> Engine:
    """The engine, which enters ``outcome``; its eager steps are observed where their profile is
    wanted.
    """
    started = time.perf_counter()
    with (
        ProgressBar("compile", KERNELS, sys.stderr, show_bars) as compiling,
        ProgressBar("load   ", GIGABYTES, sys.stderr, show_bars) as loading,
    ):
        engine = Engine.load(job.arguments.model, job.engine_config, loading, compiling=compiling)
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

    text = TokenText(job.tokenizer)
    printer = make_printer(sys.stdout, job.prompt.thinking_mode, job.prompt.tools)
    stops = frozenset() if arguments.ignore_eos else job.eos_token_ids
    try:
        with ProgressBar("prefill", TOKENS, sys.stderr, show_bars) as bar:
            tokens = engine.generate(
                job.prompt.token_ids, arguments.max_tokens, job.sampling, stops, bar
            )
            with closing(tokens):
                for token in tokens:
                    bar.erase()
                    if isinstance(outcome.profile, OpProfile):
                        outcome.profile.next_phase("decode")
                    outcome.token_ids.append(token)
                    if token not in job.eos_token_ids:
                        printer.feed(text.push(token))
        assert engine.last_run is not None
        outcome.finish_reason = engine.last_run.finish_reason
    finally:
        printer.feed(text.finish())
        printer.finish(outcome.finish_reason == "stop")


def run(arguments: argparse.Namespace) -> int:
    """The whole job; returns the exit code."""
    job = prepare(arguments)
    plan = partial(Engine.plan, arguments.model, job.engine_config, gpu_bytes(arguments))
    if arguments.plan:
        print(plan())
        return EXIT_OK
    if arguments.gpus > 1 and not arguments.quiet:
        print(plan(), file=sys.stderr)
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
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_stdout()  # The reader has seen enough, which is no error.
    report(job, outcome)
    return exit_code


def silence_stdout() -> None:
    """Discards unwritten output, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the driver. A user error is one line on stderr and exit code 2; Ctrl-C is 130."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # An answer may hold what the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        arguments = parse_arguments(argv)
        with log_lines(sys.stderr, arguments.verbose):
            return run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (UserError, FloatingPointError, OSError) as error:
        print(f"error: {user_message(error)}", file=sys.stderr)
        return EXIT_USER_ERROR


def leave(exit_code: int) -> NoReturn:
    """Ends the process as it is: torch aborts when Python tries to free the tensors of a device
    that has failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main())
