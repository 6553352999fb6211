"""Completions with tool calls, and what the tolerant parser makes of them."""

import json

from encoding import Completion, parse_completion

EOS = "<｜end▁of▁sentence｜>"
OPEN = "<｜DSML｜tool_calls>\n"
CLOSE = "</｜DSML｜tool_calls>"
CALL = (
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)


def parse(text: str, mode: str = "thinking", tools: list[dict] | None = None) -> Completion:
    return parse_completion(text, mode, tools)


def calls(completion: Completion) -> list[tuple[str, dict]]:
    functions = [call["function"] for call in completion.message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def texts(completion: Completion) -> tuple[str, str]:
    return completion.message["reasoning_content"], completion.message["content"]
