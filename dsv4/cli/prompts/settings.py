"""The settings of a line: its keys are the flags of the driver, whose values are the defaults."""

import argparse
import re
from typing import Any

from dsv4.cli.arguments import refuse_contradictions
from dsv4.cli.message_fields import REQUEST
from dsv4.command.flags import flag_name
from dsv4.errors import UserError, shorten

TEXT = "a string"
TEXTS = "a string or a list of strings"
NUMBER = "a number"
SWITCH = "true or false"
# Ranges and choices are those of the flags.
SETTINGS = {
    "system": TEXT,
    "thinking": TEXT,
    "reasoning_effort": TEXT,
    "allow_control_tokens": SWITCH,
    "raw": SWITCH,
    "max_tokens": NUMBER,
    "temperature": NUMBER,
    "top_k": NUMBER,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "seed": NUMBER,
    "stop": TEXTS,
    "ignore_eos": SWITCH,
    "logprobs": NUMBER,
    "with_token_ids": SWITCH,
}
KEYS = ("id", "prompt", *REQUEST, *SETTINGS)
_CHAT_ONLY = frozenset(("system", "thinking", "reasoning_effort", "allow_control_tokens"))
_SAMPLING_ONLY = frozenset(("top_k", "top_p", "min_p", "seed"))
_KEY_OF_FLAG = {flag_name(key): key for key in KEYS}
_FLAG = re.compile(rf"({'|'.join(_KEY_OF_FLAG)})(?![\w-])")


def line_arguments(
    parser: argparse.ArgumentParser, defaults: argparse.Namespace, line: dict[str, Any]
) -> argparse.Namespace:
    """The arguments of a run for this line alone: its settings, else those of the command line, as
    far as they mean anything beside the line's own. ``messages`` is a chat request, or None. Raises
    ``UserError`` that begins with the key.
    """
    check_keys(line)
    arguments = argparse.Namespace(**vars(defaults))
    arguments.prompts = None
    arguments.prompt = line.get("prompt")
    arguments.messages = {key: line.get(key) for key in REQUEST} if "messages" in line else None
    own = line.keys() & SETTINGS.keys()
    for key in own:
        setattr(arguments, key, parser.get_default(key))
    words = [word for key in SETTINGS if key in own for word in as_flags(key, line[key])]
    try:
        parser.parse_args(words, arguments)
        for key in idle_settings(arguments) - own:
            setattr(arguments, key, parser.get_default(key))
        refuse_contradictions(arguments)
    except UserError as error:
        raise UserError(as_keys(str(error))) from None
    return arguments


def check_keys(line: dict[str, Any]) -> None:
    """Raises ``UserError`` for unknown keys, and unless there is one prompt."""
    for key in line:
        if key not in KEYS:
            raise UserError(f"{key[:80]}: found an unknown key, expected {', '.join(KEYS)}")
    if ("prompt" in line) == ("messages" in line):
        found = "both prompt and messages" if "prompt" in line else "neither prompt nor messages"
        raise UserError(f"found {found}, expected one of them")
    if "prompt" in line and not isinstance(line["prompt"], str):
        raise UserError(f"prompt: found {shorten(line['prompt'])}, expected {TEXT}")
    if "messages" in line and not isinstance(line["messages"], list):
        raise UserError(f"messages: found {shorten(line['messages'])}, expected a list")
    for key in ("tools", "response_format"):
        if key in line and "messages" not in line:
            raise UserError(f"{key}: found with prompt, expected messages")


def as_flags(key: str, value: object) -> list[str]:
    """The words of a command line that say the same. Raises ``UserError`` for another type."""
    kind = SETTINGS[key]
    flag = flag_name(key)
    if kind == SWITCH and isinstance(value, bool):
        return [flag] if value else []
    if kind == NUMBER and isinstance(value, int | float) and not isinstance(value, bool):
        return [f"{flag}={value}"]
    texts = [value] if isinstance(value, str) else value
    if kind == TEXT and isinstance(value, str):
        return [f"{flag}={value}"]
    if kind == TEXTS and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return [f"{flag}={text}" for text in texts]
    raise UserError(f"{key}: found {shorten(value)}, expected {kind}")


def idle_settings(arguments: argparse.Namespace) -> frozenset[str]:
    """The settings that change nothing beside the others."""
    return (
        (_CHAT_ONLY if arguments.raw and arguments.messages is None else frozenset())
        | (frozenset() if arguments.messages is None else {"raw", "system"})
        | (frozenset() if arguments.thinking == "on" else {"reasoning_effort"})
        | (_SAMPLING_ONLY if arguments.temperature == 0 else frozenset())
    )


def as_keys(message: str) -> str:
    """An error of the command line as one of a line: ``--top-p`` is ``top_p``."""
    message = message.removesuffix(" (see --help)")
    return _FLAG.sub(lambda flag: _KEY_OF_FLAG[flag[0]], message)
