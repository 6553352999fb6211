"""Examples of the demo tasks and their prompt text, in the model's own chat encoding
(model.md#rendering).

The generator renders millions of conversations, so the few shapes it needs are written out here;
the tests hold them equal to ``encoding.deepseek_v4_encoding.encode_messages``.
"""

import json
from dataclasses import dataclass
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
DSML = "｜DSML｜"
THINK = "<think>"
END_THINK = "</think>"

TOOLS_TEXT = """## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), \
you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True)
class Example:
    """One document: ``parts`` alternate given text and the answer the model must produce (EOS
    included).

    ``prompt`` is everything before the last answer; ``answer`` is the last answer without EOS;
    exact match is on it.
    """

    task: str
    parts: tuple[str, ...]

    @property
    def prompt(self) -> str:
        return "".join(self.parts[:-1])

    @property
    def answer(self) -> str:
        return self.parts[-1].removesuffix(EOS)


def conversation(
    task: str, turns: list[tuple[str, str]], thinking: bool = False, system: str = ""
) -> Example:
    """User and assistant turns after an optional system text. In thinking mode an answer is
    "reason</think>text".
    """
    parts = []
    for index, (question, answer) in enumerate(turns):
        last = index == len(turns) - 1
        opening = THINK if thinking and last else END_THINK
        start = BOS + system if index == 0 else ""
        parts += [f"{start}{USER}{question}{ASSISTANT}{opening}", answer + EOS]
    return Example(task, tuple(parts))


def raw(task: str, text: str, completion: str, bos: bool) -> Example:
    """Plain text continued without any chat encoding."""
    return Example(task, ((BOS if bos else "") + text, completion + EOS))


def tools_system(functions: list[dict[str, Any]], content: str = "") -> str:
    """System text with the tools block; ``functions`` are OpenAI function objects."""
    schemas = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return content + "\n\n" + TOOLS_TEXT.format(schemas=schemas)


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """One DSML call: strings raw, everything else as JSON."""
    lines = []
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        flag = "true" if is_string else "false"
        lines.append(f'<{DSML}parameter name="{key}" string="{flag}">{text}</{DSML}parameter>')
    body = "\n".join(lines)
    return (
        f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="{name}">\n{body}\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>"
    )


def tool_result(content: str) -> str:
    """The result of a tool, as the text of a user turn."""
    return f"<tool_result>{content}</tool_result>"
