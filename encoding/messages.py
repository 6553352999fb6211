"""OpenAI-style message dictionaries, checked and turned into typed messages (model.md#messages).

Everything behind this module may rely on the types; everything a caller can get wrong is refused
here with a ValueError that names the message.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .control_tokens import TASK_TOKENS


@dataclass(frozen=True)
class TextBlock:
    """A piece of user text."""

    text: str


@dataclass(frozen=True)
class ToolResult:
    """The result of the call `call_id` ("" if the caller did not say)."""

    call_id: str
    text: str


@dataclass(frozen=True)
class ToolCall:
    """One call of an assistant turn. `arguments` are the parsed JSON arguments in their order."""

    call_id: str
    name: str
    arguments: dict[str, object]


@dataclass
class Message:
    """One message. User and tool messages have `blocks`, all others have `content`. `where` names
    it in errors; a merged user turn, in which nothing can be wrong any more, has none.
    """

    role: str
    content: str = ""
    blocks: list[TextBlock | ToolResult] = field(default_factory=list)
    tools: list[dict[str, object]] = field(default_factory=list)
    response_format: object = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    task: str | None = None
    wo_eos: bool = False
    where: str = ""


def to_json(value: object, where: str) -> str:
    """JSON text as the model was trained on it: default separators, no ASCII escapes, key order
    kept. ValueError for what JSON does not have, NaN and the infinities among it, and for lone
    surrogates, which no prompt can hold.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON ({error})") from error


def check_thinking_mode(mode: object) -> None:
    """Raises ValueError for anything but "chat" and "thinking"."""
    if mode not in ("chat", "thinking"):
        raise ValueError(f"thinking_mode is {mode!r}, expected 'chat' or 'thinking'")


def check_string(value: object, where: str) -> None:
    """Raises ValueError for anything but a string; `where` names it."""
    if not isinstance(value, str):
        raise ValueError(f"{where} is {type(value).__name__}, expected a string")


def parse_messages(messages: object, where: str) -> list[Message]:
    """Typed copies of the dictionaries in `messages`; the input is not changed. ValueError names
    the faulty message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ValueError(f"{where} is {type(messages).__name__}, expected a list of messages")
    return [_parse_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _parse_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {type(message).__name__}, expected an object with a role")
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{where}.role is {role!r:.80}, expected a string")
    task = message.get("task")
    if task is not None and (not isinstance(task, str) or task not in TASK_TOKENS):
        raise ValueError(f"{where}.task is {task!r:.80}, expected one of {', '.join(TASK_TOKENS)}")
    wo_eos = message.get("wo_eos")
    if wo_eos is not None and not isinstance(wo_eos, bool):
        raise ValueError(f"{where}.wo_eos is {wo_eos!r:.80}, expected true or false")
    parsed = Message(
        role,
        tools=parse_tools(message.get("tools"), f"{where}.tools"),
        response_format=message.get("response_format"),
        task=task,
        wo_eos=bool(wo_eos),
        where=where,
    )
    content = content_text(message.get("content"), f"{where}.content")
    if role == "user":
        parsed.blocks = _parse_user_blocks(message, content, where)
    elif role == "tool":
        call_id = _optional_string(message, "tool_call_id", where)
        parsed.blocks = [ToolResult(call_id, content)]
    else:
        parsed.content = content
    if role == "assistant":
        parsed.reasoning = _optional_string(message, "reasoning_content", where)
        parsed.tool_calls = _parse_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if role == "developer" and not content:
        raise ValueError(f"{where}.content is missing or empty, a developer message needs text")
    if role == "latest_reminder" and message.get("content") is None:
        raise ValueError(f"{where}.content is missing, a latest_reminder message needs text")
    return parsed


def content_text(content: object, where: str) -> str:
    """A content as one string: None is empty, parts are joined with blank lines
    (model.md#messages). ValueError names `where`.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError(
            f"{where} is {type(content).__name__}, expected a string or a list of parts"
        )
    return "\n\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def parse_tools(tools: object, where: str) -> list[dict[str, object]]:
    """The function schemas of a `tools` list in the OpenAI format; None is no tools. ValueError
    names `where`.
    """
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"{where} is {type(tools).__name__}, expected a list")
    functions = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(
                f'{where}[{index}] has no object "function", expected the OpenAI tool format'
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(
                f"{where}[{index}].function.name is {function.get('name')!r:.80}, expected a name"
            )
        functions.append(dict(function))
    return functions


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError(f"{where} is not an object with a string type")
    if part["type"] != "text":
        return f"[Unsupported {part['type']}]"
    return _optional_string(part, "text", where)


def _parse_user_blocks(message: Mapping, content: str, where: str) -> list[TextBlock | ToolResult]:
    given = message.get("content_blocks")
    if given is None:
        if message.get("content") is None:
            raise ValueError(f"{where}.content is missing, a user message needs text")
        return [TextBlock(content)]
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{where}.content_blocks is {type(given).__name__}, expected a list")
    blocks: list[TextBlock | ToolResult] = []
    for index, block in enumerate(given):
        place = f"{where}.content_blocks[{index}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            call_id = _optional_string(block, "tool_use_id", place)
            result = content_text(block.get("content"), f"{place}.content")
            blocks.append(ToolResult(call_id, result))
        else:
            blocks.append(TextBlock(_part_text(block, place)))
    return blocks


def _parse_tool_calls(calls: object, where: str) -> list[ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{where} is {type(calls).__name__}, expected a list")
    return [_parse_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _parse_tool_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ValueError(f'{where} has no object "function", expected the OpenAI tool call format')
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.function.name is {name!r:.80}, expected a name")
    call_id = _optional_string(call, "id", where) or _optional_string(
        function, "id", f"{where}.function"
    )
    return ToolCall(
        call_id, name, _parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    )


def _parse_arguments(arguments: object, where: str) -> dict[str, object]:
    """Arguments as a dictionary, text that is no JSON object as the one argument `arguments`
    (model.md#messages).
    """
    if isinstance(arguments, Mapping):
        arguments = to_json(arguments, where)
    if not isinstance(arguments, str):
        raise ValueError(
            f"{where} is {type(arguments).__name__}, expected a JSON string or an object"
        )
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    if not isinstance(parsed, dict):
        return {"arguments": arguments}
    to_json(parsed, where)  # Here, where the place is known.
    return parsed


def _optional_string(mapping: Mapping, key: str, where: str) -> str:
    value = mapping.get(key)
    if value is None:
        return ""
    check_string(value, f"{where}.{key}")
    return value
