"""The file of ``--prompts``: every line is checked before any weight is read."""

import argparse
import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.cli.draft_flags import drafts_asked_for
from dsv4.cli.flags import build_parser
from dsv4.cli.generation_defaults import sampling_params
from dsv4.cli.input_file import read_input
from dsv4.cli.job import ModelFiles
from dsv4.cli.prompt import PromptTooLong, build_prompt, most_tokens
from dsv4.cli.prompts.settings import SETTINGS, as_keys, line_arguments
from dsv4.command.errors import user_message
from dsv4.errors import UserError, shorten
from dsv4.json_object import parse_json_object
from dsv4.limits import MAX_DRAFTS
from dsv4.sampling import SamplingParams

# What else decides about an answer; devices, graphs and chunks do not.
_NUMBERS = ("compute_dtype", "kv_dtype", "index_dtype", "prefill_activations")
# What the decoder says of a text that is one line.
_PLACE = re.compile(r": line 1 column (\d+) \(char \d+\)")


@dataclass(frozen=True)
class PromptLine:
    """A line that can be asked: ``arguments`` are those of a run for it alone, ``request`` a
    fingerprint of them. ``tokens``: of prompt and answer at most, 0 for a prompt that no context
    holds.
    """

    number: int
    id: int | str
    arguments: argparse.Namespace
    request: str
    tokens: int


def read_prompts(arguments: argparse.Namespace, files: ModelFiles) -> list[PromptLine]:
    """The lines of the file of ``--prompts`` (``-``: stdin). Raises ``UserError`` that names file,
    line and key for the first one that cannot be asked. A prompt that is too long can.
    """
    file = arguments.prompts
    sampling_params(arguments, files.generation)  # The flags have to go together by themselves.
    content = read_input("--prompts", file).removeprefix(codecs.BOM_UTF8)
    texts = content.removesuffix(b"\n").split(b"\n")
    if texts == [b""]:
        raise UserError(f"--prompts: {file}: found no lines, expected at least 1")
    parser = build_parser()
    lines: dict[int | str, PromptLine] = {}
    for number, text in enumerate(texts, 1):
        with line_errors(f"--prompts: {file}: line {number}: "):
            line = read_line(number, text, parser, arguments, files)
            if line.id in lines:
                other = f"which line {lines[line.id].number} has too"
                raise UserError(f"id: found {shorten(line.id)}, {other}, expected another one")
        lines[line.id] = line
    return list(lines.values())


@contextmanager
def line_errors(prefix: str) -> Iterator[None]:
    """Errors of a run as errors of a line."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{prefix}{as_keys(user_message(error))}") from None


def read_line(
    number: int,
    text: bytes,
    parser: argparse.ArgumentParser,
    defaults: argparse.Namespace,
    files: ModelFiles,
) -> PromptLine:
    """One line; without an ``id`` its number is that. Raises ``UserError``."""
    line = parse_line(text)
    id_ = line.get("id", number)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        raise UserError(f"id: found {shorten(id_)}, expected a string or an integer")
    arguments = line_arguments(parser, defaults, line)
    params = sampling_params(arguments, files.generation)
    tokens = most_line_tokens(arguments, files)
    return PromptLine(number, id_, arguments, fingerprint(arguments, params, tokens), tokens)


def most_line_tokens(arguments: argparse.Namespace, files: ModelFiles) -> int:
    """Tokens of prompt and answer at most, 0 for a prompt that no context holds. Raises
    ``UserError`` for what cannot be encoded.
    """
    try:
        prompt = build_prompt(arguments, files.tokenizer, files.config)
    except PromptTooLong:
        return 0
    fits = len(prompt.token_ids) <= most_tokens(arguments, files.config)
    return len(prompt.token_ids) + arguments.max_tokens if fits else 0


def parse_line(text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``. Raises ``UserError``."""
    try:
        return parse_json_object(text.decode("utf-8"), "line")
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not UTF-8") from None
    except UserError as error:
        message = str(error).removeprefix("line: ")
        raise UserError(_PLACE.sub(r" at column \1", message)) from None


def fingerprint(arguments: argparse.Namespace, params: SamplingParams, tokens: int) -> str:
    """SHA-256 in hexadecimal of everything that decides about an answer but a drawn seed.
    ``tokens``: of prompt and answer at most.
    """
    asked = {key: getattr(arguments, key) for key in ("prompt", "messages", *SETTINGS, *_NUMBERS)}
    asked["model"] = Path(arguments.model).resolve().name
    # A seed draws another text with other drafts.
    if params.temperature > 0 and arguments.seed is not None:
        asked |= drafts_asked_for(arguments)
        # Near the end of the caches there is no room for as many.
        most = arguments.max_context
        if most is not None and arguments.draft != "off" and tokens + MAX_DRAFTS > most:
            asked["max_context"] = most
    return hashlib.sha256(json.dumps(asked).encode("ascii")).hexdigest()
