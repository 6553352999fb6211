"""Completion text → message, accepting only what the format prescribes (model.md#parsing)."""

import json
import re
from dataclasses import dataclass

from .control_tokens import BOS, DSML, EOS, THINK_CLOSE, THINK_OPEN
from .messages import check_string, check_thinking_mode

_BLOCK_OPEN = f"\n\n<{DSML}tool_calls"
_BLOCK_CLOSE = f"</{DSML}tool_calls>"
_INVOKE_OPEN = f"<{DSML}invoke"
_INVOKE_CLOSE = f"</{DSML}invoke"
_PARAMETER_OPEN = f"<{DSML}parameter"
_PARAMETER_END = f"/{DSML}parameter"

# One newline ends the header; a call without parameters has an empty line after it.
_INVOKE_HEADER = re.compile(r'\s*name="(.+?)">\n\n?', re.DOTALL)
_PARAMETER = re.compile(r' name="(.*?)" string="(true|false)">(.*)<', re.DOTALL)


def parse_message_from_completion_text(text: str, thinking_mode: str) -> dict:
    """{"role": "assistant", "content", "reasoning_content", "tool_calls"} of a completion that ends
    with EOS.

    In thinking mode `text` begins with the reasoning, since `<think>` is the end of the prompt.
    `tool_calls` are in the OpenAI format without ids; `arguments` is JSON text in which values of
    other types than string stand as the model wrote them. Raises ValueError, with one line, for
    every deviation from the format; `parse_completion` of `encoding.tolerant_parser` accepts any
    text.
    """
    check_thinking_mode(thinking_mode)
    check_string(text, "completion")
    reader = _Reader(text)
    reasoning = ""
    if thinking_mode == "thinking":
        reasoning, stop = reader.read_until(THINK_CLOSE, _BLOCK_OPEN)
        if stop != THINK_CLOSE:
            raise ValueError(f"missing {THINK_CLOSE} after the reasoning")
    content, stop = reader.read_until(EOS, _BLOCK_OPEN)
    tool_calls = []
    if stop == _BLOCK_OPEN:
        tool_calls = _parse_tool_block(reader)
        rest, stop = reader.read_until(EOS)
        if rest:
            raise ValueError(f"unexpected text after the tool calls: {rest[:40]!r}")
    if stop != EOS:
        raise ValueError(f"missing end-of-sentence token {EOS}")
    if reader.position != len(text):
        raise ValueError(f"unexpected text after {EOS}: {text[reader.position :][:40]!r}")
    for token in (BOS, EOS, THINK_OPEN, THINK_CLOSE, DSML):
        if token in content or token in reasoning:
            raise ValueError(f"unexpected control token {token} in the text")
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tool_calls,
    }


@dataclass
class _Reader:
    text: str
    position: int = 0

    def read_until(self, *stops: str) -> tuple[str, str | None]:
        """Text before the nearest of `stops`, and which one it was; all the rest and None if there
        is none.
        """
        found = [(self.text.find(stop, self.position), stop) for stop in stops]
        start = self.position
        end, stop = min(
            ((at, stop) for at, stop in found if at >= 0), default=(len(self.text), None)
        )
        self.position = end + len(stop or "")
        return self.text[start:end], stop


def _parse_tool_block(reader: _Reader) -> list[dict]:
    calls = []
    while True:
        between, stop = reader.read_until(_INVOKE_OPEN, _BLOCK_CLOSE)
        if stop is None:
            raise ValueError(f"missing {_BLOCK_CLOSE}")
        if between != ">\n":
            raise ValueError(
                f"expected '>' and a newline in the tool calls, found {between[:40]!r}"
            )
        if stop == _BLOCK_CLOSE:
            return calls
        calls.append(_parse_invoke(reader))


def _parse_invoke(reader: _Reader) -> dict:
    header, stop = reader.read_until(_PARAMETER_OPEN, _INVOKE_CLOSE)
    name = _INVOKE_HEADER.fullmatch(header)
    if name is None:
        raise ValueError(f"malformed head of a tool call: {header[:80]!r}")
    values: dict[str, str] = {}
    while stop == _PARAMETER_OPEN:
        key, value = _parse_parameter(reader)
        if key in values:
            raise ValueError(f"parameter {key!r} is given twice")
        values[key] = value
        between, stop = reader.read_until(_PARAMETER_OPEN, _INVOKE_CLOSE)
        if stop is not None and between != ">\n":
            raise ValueError(
                f"expected '>' and a newline after parameter {key!r}, found {between[:40]!r}"
            )
    if stop is None:
        raise ValueError(f"missing {_INVOKE_CLOSE}> of tool call {name[1]!r}")
    arguments = "{" + ", ".join(f"{quote(key)}: {value}" for key, value in values.items()) + "}"
    return {"type": "function", "function": {"name": name[1], "arguments": arguments}}


def _parse_parameter(reader: _Reader) -> tuple[str, str]:
    source, _ = reader.read_until(_PARAMETER_END)
    match = _PARAMETER.fullmatch(source)
    if match is None:
        raise ValueError(f"malformed parameter: {source[:80]!r}")
    key, is_string, value = match.groups()
    if is_string == "true":
        return key, quote(value)
    if not is_json(value):
        raise ValueError(f"value of parameter {key!r} is not JSON: {value[:80]!r}")
    return key, value


def is_json(text: str) -> bool:
    """Whether `text` is a JSON value that a later prompt can hold: without NaN, numbers beyond
    float64 and lone surrogates.
    """
    try:
        json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        return False
    return True


def quote(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
