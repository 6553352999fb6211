"""``--trace``: the checks before the weights are read, and the file that a generation fills."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsv4.cli.draft_flags import drafts_asked_for
from dsv4.cli.job import Job
from dsv4.command.flags import flag_name
from dsv4.command.output_file import check_replaced_output
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.layers.values import Watch
from dsv4.trace.file import TraceFile
from dsv4.trace.patterns import EVERY_VALUE, matching
from dsv4.trace.write import trace_metadata


def check_trace(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """Raises ``UserError`` for flags that ``traced`` cannot serve."""
    path = arguments.trace
    if path is None:
        if arguments.trace_at:
            raise UserError("--trace-at: found without --trace, expected both")
        return
    if arguments.profile:
        raise UserError("--trace: found together with --profile, expected one of them")
    drafts = drafts_asked_for(arguments)
    if drafts and arguments.draft != "off":
        flag = flag_name(next(iter(drafts)))
        raise UserError(f"{flag}: found together with --trace, whose steps make no drafts")
    check_replaced_output("--trace", path)
    matching(config, arguments.trace_at or EVERY_VALUE, "--trace-at")


@contextmanager
def traced(job: Job, engine: Engine) -> Iterator[Watch | None]:
    """What ``Engine.generate`` has to show; the file is whole when the block ends. An error for NaN
    says that the file has it.
    """
    arguments = job.arguments
    if arguments.trace is None:
        yield None
        return
    prompt_tokens = len(job.prompt.token_ids)
    metadata = trace_metadata(engine, Path(arguments.model).resolve().name)
    wants = matching(engine.config, arguments.trace_at or EVERY_VALUE, "--trace-at")
    most_tokens = min(prompt_tokens + arguments.max_tokens, engine.max_context)
    try:
        with TraceFile(arguments.trace, metadata, most_tokens, prompt_tokens) as file:
            yield Watch(file.add, wants)
    except FloatingPointError as error:
        # The step that met it has ended.
        found = f"{error}; --trace: {arguments.trace} has the steps up to there"
        raise FloatingPointError(found) from None
