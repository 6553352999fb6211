"""Answering the lines of ``--prompts``, one after another."""

import argparse
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from dsv4.cli.answer import answer
from dsv4.cli.arguments import engine_config
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults
from dsv4.cli.job import ModelFiles, Outcome, context_tokens, make_job
from dsv4.cli.load import bars_are_shown, load_engine, say_plan
from dsv4.cli.prompt import build_prompt
from dsv4.cli.prompts.answer_file import AnswerFile, open_answers
from dsv4.cli.prompts.prompts_file import PromptLine, read_prompts
from dsv4.cli.report import describe_completion, describe_prompt
from dsv4.cli.stream import TokenText
from dsv4.command.errors import user_message
from dsv4.command.program import EXIT_CHECK_FAILED, EXIT_OK
from dsv4.command.progress import ProgressBar, Unit
from dsv4.command.signals import stop_code
from dsv4.command.streams import say
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError

ANSWERS = Unit("answers", 1, 0)


@dataclass
class Tally:
    """What a run has done so far; ``before``: lines that an earlier one has."""

    before: int
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Counts the answer to a line."""
        if "error" in record:
            self.failed += 1
            return
        self.answered += 1
        self.prompt_tokens += record["tokens"]["prompt"]
        self.tokens += record["tokens"]["completion"]

    def line(self, seconds: float, end: str) -> str:
        """The summary, without what there was none of."""
        parts = [f"answered {self.answered}", f"failed {self.failed}"]
        if self.before:
            parts.append(f"there before {self.before}")
        parts.append(f"prompts {self.prompt_tokens} tokens")
        parts.append(f"answers {self.tokens} tokens")
        return " · ".join([*parts, f"{seconds:.1f} s", *([end] if end else [])])


def answer_prompts(arguments: argparse.Namespace) -> int:
    """Answers the lines that ``--out`` has no answer to; returns the exit code. Raises
    ``UserError``.

    The context is that of all lines, so that it does not depend on where a run was resumed.
    """
    started = time.perf_counter()
    files = ModelFiles.read(arguments.model)
    lines = read_prompts(arguments, files)
    context = context_tokens(arguments, files.config, max(line.tokens for line in lines))
    with open_answers(arguments.out, arguments.prompts, lines, context) as answers:
        tally = Tally(len(answers.failed))
        code = EXIT_OK
        end = ""
        try:
            answer_lines(arguments, files, lines, context, answers, tally)
        except KeyboardInterrupt as stop:
            code = stop_code(stop)
            end = "interrupted"
        if not arguments.quiet:
            say(tally.line(time.perf_counter() - started, end))
        return code or (EXIT_CHECK_FAILED if any(answers.failed.values()) else EXIT_OK)


def answer_lines(
    arguments: argparse.Namespace,
    files: ModelFiles,
    lines: Sequence[PromptLine],
    context: int,
    answers: AnswerFile,
    tally: Tally,
) -> None:
    """Loads an engine of ``context`` tokens, unless everything is answered, and fills ``answers``
    and ``tally``.
    """
    waiting = [line for line in lines if line.id not in answers.failed]
    if not waiting:
        return
    config = replace(engine_config(arguments), max_context=context)
    plan = partial(Engine.plan, arguments.model, config)
    say_plan(arguments, plan)
    shown = bars_are_shown(arguments)
    with device_faults(plan):
        pairs = answered_lines(arguments, files, config, waiting)
        with ProgressBar("answers", ANSWERS, sys.stderr, shown) as bar, closing(pairs):
            bar(len(answers.failed), len(lines))
            for line, record in pairs:
                answers.append(line, record)
                tally.add(record)
                bar(len(answers.failed), len(lines))


def answered_lines(
    arguments: argparse.Namespace,
    files: ModelFiles,
    config: EngineConfig,
    lines: Sequence[PromptLine],
) -> Generator[tuple[PromptLine, dict[str, Any]], None, None]:
    """Lines with their answers as they are ready, of an engine that this loads or of ``--ray``."""
    if arguments.ray is not None:
        # Here, because importing Ray takes a second.
        from dsv4.cli.prompts.on_ray import answers_on_ray

        return answers_on_ray(arguments, config, lines)
    limit_cpu_threads(files.config)
    engine = load_engine(arguments, config)
    return ((line, answer_line(line, files, engine)) for line in lines)


def answer_line(line: PromptLine, files: ModelFiles, engine: Engine) -> dict[str, Any]:
    """What the line of the answer holds beside its id and request: the answer with the names of the
    ``--json`` file, or the error in its place.
    """
    outcome = Outcome(engine=engine)
    try:
        prompt = build_prompt(line.arguments, files.tokenizer, files.config)
        job = make_job(line.arguments, files, prompt, engine.max_context)
        for _ in answer(job, engine, outcome, TokenText(files.tokenizer, line.arguments.stop)):
            pass
    except (UserError, FloatingPointError) as error:
        return {"error": user_message(error)}
    completion = describe_completion(job, outcome)
    return {
        "prompt": describe_prompt(job) if line.arguments.with_token_ids else None,
        "completion": completion
        if line.arguments.with_token_ids
        else {**completion, "token_ids": None},
        "finish_reason": outcome.finish_reason,
        "stop_string": outcome.stop_string,
        "tokens": {"prompt": len(prompt.token_ids), "completion": len(outcome.token_ids)},
        "sampling": asdict(job.sampling),
    }
