"""Typed messages → pieces of prompt text (model.md#rendering).

A piece is either markup, written by this module, or data, written by somebody else. The distinction
is kept until the very end, so that control tokens quoted in data can be told from those that give
the prompt its form.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple

from .control_tokens import (
    ASSISTANT,
    DSML,
    EOS,
    LATEST_REMINDER,
    TASK_TOKENS,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_RESULT_CLOSE,
    TOOL_RESULT_OPEN,
    USER,
    neutralize,
    neutralize_tool_result,
)
from .messages import Message, ToolCall, ToolResult, to_json
from .preprocess import last_user_index

_TOOLS_BEFORE_SCHEMAS = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_OPEN}), \
you MUST output your complete reasoning inside {THINK_OPEN}...{THINK_CLOSE} \
BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_CLOSE} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_AFTER_SCHEMAS = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


class Piece(NamedTuple):
    """Prompt text and who wrote it."""

    text: str
    kind: Literal["markup", "data", "tool_result"] = "markup"


def join_pieces(pieces: list[Piece], neutralize_data: bool) -> str:
    """The prompt text. With `neutralize_data`, control tokens stand only where markup put them.

    Neighbouring data pieces are looked at together: two system messages may split a literal between
    them.
    """
    runs = groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.kind)
    texts = []
    for kind, run in runs:
        text = "".join(piece.text for piece in run)
        if neutralize_data and kind == "data":
            text = neutralize(text)
        elif neutralize_data and kind == "tool_result":
            text = neutralize_tool_result(text)
        texts.append(text)
    return "".join(texts)


def render_messages(
    messages: list[Message], thinking: bool, drop_thinking: bool
) -> Iterator[list[Piece]]:
    """One list of pieces per message of the preprocessed conversation. ValueError for a role that
    has no rendering.
    """
    last_user = last_user_index(messages)
    for index, message in enumerate(messages):
        previous_has_task = index > 0 and messages[index - 1].task is not None
        next_role = messages[index + 1].role if index + 1 < len(messages) else None
        after_last_user = index > last_user
        if message.role == "assistant":
            keeps_thinking = not drop_thinking or after_last_user
            with_thinking = thinking and not previous_has_task and keeps_thinking
            pieces = _assistant(message, with_thinking)
        else:
            pieces = _other_role(message)
        opens_thinking = thinking and (not drop_thinking or index >= last_user)
        yield pieces + _transition(message, next_role, thinking, opens_thinking)


def tool_calls_opening(name: str | None = None) -> str:
    """What a turn that calls tools goes on with behind its text; with `name` up to the arguments of
    a call of this tool.
    """
    opening = f"\n\n<{DSML}tool_calls>\n"
    return opening if name is None else f'{opening}<{DSML}invoke name="{neutralize(name)}">\n'


def _other_role(message: Message) -> list[Piece]:
    match message.role:
        case "system":
            return _instructions(message)
        case "developer":
            return [Piece(USER), *_instructions(message)]
        case "user":
            return _user(message)
        case "latest_reminder":
            return [Piece(LATEST_REMINDER), Piece(message.content, "data")]
    raise ValueError(
        f"{message.where}: unknown role {message.role!r:.80}, "
        "expected system, user, assistant, tool, developer or latest_reminder"
    )


def _instructions(message: Message) -> list[Piece]:
    """Text of a system or developer message, its tools and its response format."""
    pieces = [Piece(message.content, "data")]
    if message.tools:
        schemas = "\n".join(
            to_json(tool, f"{message.where}: tool {tool['name']!r}") for tool in message.tools
        )
        pieces += [
            Piece("\n\n" + _TOOLS_BEFORE_SCHEMAS),
            Piece(schemas, "data"),
            Piece(_TOOLS_AFTER_SCHEMAS),
        ]
    if message.response_format:
        schema = to_json(message.response_format, f"{message.where}.response_format")
        pieces += [Piece("\n\n" + _RESPONSE_FORMAT), Piece(schema, "data")]
    return pieces


def _user(message: Message) -> list[Piece]:
    pieces = [Piece(USER)]
    for index, block in enumerate(message.blocks):
        if index > 0:
            pieces.append(Piece("\n\n"))
        if isinstance(block, ToolResult):
            pieces += [
                Piece(TOOL_RESULT_OPEN),
                Piece(block.text, "tool_result"),
                Piece(TOOL_RESULT_CLOSE),
            ]
        else:
            pieces.append(Piece(block.text, "data"))
    return pieces


def _assistant(message: Message, with_thinking: bool) -> list[Piece]:
    pieces = []
    if with_thinking:
        pieces += [Piece(message.reasoning, "data"), Piece(THINK_CLOSE)]
    pieces.append(Piece(message.content, "data"))
    if message.tool_calls:
        pieces.append(Piece(tool_calls_opening()))
        for index, call in enumerate(message.tool_calls):
            pieces += [Piece("\n"), *_tool_call(call)] if index > 0 else _tool_call(call)
        pieces.append(Piece(f"\n</{DSML}tool_calls>"))
    if not message.wo_eos:
        pieces.append(Piece(EOS))
    return pieces


def _tool_call(call: ToolCall) -> list[Piece]:
    pieces = [Piece(f'<{DSML}invoke name="'), Piece(call.name, "data"), Piece('">\n')]
    for index, (name, value) in enumerate(call.arguments.items()):
        is_string = isinstance(value, str)
        text = value if is_string else to_json(value, f"argument {name!r} of {call.name!r}")
        pieces += [
            Piece(("\n" if index > 0 else "") + f'<{DSML}parameter name="'),
            Piece(name, "data"),
            Piece(f'" string="{"true" if is_string else "false"}">'),
            Piece(text, "data"),
            Piece(f"</{DSML}parameter>"),
        ]
    pieces.append(Piece(f"\n</{DSML}invoke>"))
    return pieces


def _transition(
    message: Message, next_role: str | None, thinking: bool, opens_thinking: bool
) -> list[Piece]:
    """What asks the model to speak, where the message is followed by nothing, an assistant or a
    reminder.
    """
    if next_role not in (None, "assistant", "latest_reminder"):
        return []
    if message.task == "action":
        return [
            Piece(ASSISTANT),
            Piece(THINK_OPEN if thinking else THINK_CLOSE),
            Piece(TASK_TOKENS["action"]),
        ]
    if message.task is not None:
        return [Piece(TASK_TOKENS[message.task])]
    if message.role in ("user", "developer"):
        return [Piece(ASSISTANT), Piece(THINK_OPEN if opens_thinking else THINK_CLOSE)]
    return []
