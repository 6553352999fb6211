"""Answers one prompt with a DeepSeek-V4 checkpoint: load, prefill, decode, text as it is produced,
one summary line. With ``--prompts`` the prompts of a file, one after another; with
``--interactive`` a chat.
"""

import sys
from importlib.util import find_spec

from dsv4.command.signals import end_at_once

if __name__ == "__main__":
    end_at_once()
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
from dsv4.cli.answer import answer
from dsv4.cli.arguments import parse_arguments
from dsv4.cli.chat.run import chat
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults
from dsv4.cli.job import Job, Outcome, prepare
from dsv4.cli.load import bars_are_shown, load_engine, say_plan
from dsv4.cli.log_lines import log_lines
from dsv4.cli.plan_flags import gpu_bytes
from dsv4.cli.prompts.run import answer_prompts
from dsv4.cli.report import report, report_plan
from dsv4.cli.state import check_state, load_state, save_state
from dsv4.cli.stream import TokenText, make_printer
from dsv4.cli.trace import check_trace, traced
from dsv4.command.program import EXIT_OK, command, run_program
from dsv4.command.progress import TOKENS, ProgressBar, StatusLine
from dsv4.command.signals import stop_code
from dsv4.command.streams import silence_stdout
from dsv4.config import layer_kinds
from dsv4.errors import UserError
from dsv4.measure.graph_profile import profile_decoder
from dsv4.measure.op_profile import OpProfile


def load(job: Job, outcome: Outcome) -> Engine:
    """The engine, which enters ``outcome``; its eager steps are observed where their profile is
    wanted.
    """
    started = time.perf_counter()
    engine = load_engine(job.arguments, job.engine_config)
    outcome.engine = engine
    outcome.load_seconds = time.perf_counter() - started
    if job.arguments.profile and engine.decoder is None:
        state = engine.state
        profile = OpProfile(state.all_devices, layer_kinds(engine.config), len(state.ranks))
        engine.steps.observer = profile
        outcome.profile = profile
    return engine


def generate(job: Job, outcome: Outcome) -> None:
    """Loads the model and streams the answer to stdout; ``outcome`` is filled as it goes."""
    limit_cpu_threads(job.model_config)
    engine = load(job, outcome)
    reused = load_state(job, engine)
    is_a_turn = job.before is not None or job.arguments.save_state is not None

    shown = bars_are_shown(job.arguments)
    text = TokenText(job.tokenizer, job.arguments.stop)
    status = StatusLine(sys.stderr, shown)
    printer = make_printer(sys.stdout, job.prompt.thinking_mode, job.prompt.tools, status)
    try:
        with (
            ProgressBar("prefill", TOKENS, sys.stderr, shown) as bar,
            traced(job, engine) as watch,
            closing(answer(job, engine, outcome, text, bar, watch, is_a_turn)) as pieces,
        ):
            bar(0, len(job.prompt.token_ids) - reused)
            for piece in pieces:
                bar.erase()
                if isinstance(outcome.profile, OpProfile):
                    outcome.profile.next_phase("decode")
                printer.feed(piece)
    finally:
        printer.feed(text.finish())
        printer.finish(outcome.complete)
    if job.arguments.save_state is not None:
        save_state(job, outcome, engine)


def run(arguments: argparse.Namespace) -> int:
    """The whole job; returns the exit code."""
    if arguments.prompts is not None:
        return answer_prompts(arguments)
    if arguments.interactive:
        return chat(arguments)
    job = prepare(arguments)
    check_trace(arguments, job.model_config)
    check_state(job)
    plan = partial(Engine.plan, arguments.model, job.engine_config, gpu_bytes(arguments))
    if arguments.plan:
        report_plan(job, plan())
        return EXIT_OK
    say_plan(arguments, plan)
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
    except (UserError, FloatingPointError, OSError) as error:
        if not outcome.token_ids:
            raise
        outcome.error = error
        outcome.finish_reason = "error"
    report(job, outcome)
    if outcome.error is not None:
        raise outcome.error
    return exit_code


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command; docs/commands.md has its exit codes."""
    arguments = parse_arguments(argv)
    with log_lines(sys.stderr, arguments.verbose):
        return run(arguments)


if __name__ == "__main__":
    run_program(main)
