"""Preprocessing of a conversation before it is rendered (model.md#messages): merge, sort, drop
developer messages.
"""

from dataclasses import replace

from .messages import Message, ToolResult

_ROLES_ALWAYS_KEPT = ("user", "assistant", "system", "latest_reminder", "direct_search_results")


def merge_user_turns(messages: list[Message]) -> list[Message]:
    """Tool and user messages that follow each other become one user turn; the model has no tool
    role.

    A user message does not join a turn that carries a task. The task of a user message that does
    join is lost, as in the official encoder.
    """
    merged: list[Message] = []
    for message in messages:
        if message.role not in ("user", "tool"):
            merged.append(message)
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.role == "user"
            and (message.role == "tool" or last.task is None)
        ):
            last.blocks.extend(message.blocks)
        elif message.role == "tool":
            merged.append(Message("user", blocks=list(message.blocks)))
        else:
            # `tools` and `response_format` have no place in a user turn.
            merged.append(Message("user", blocks=list(message.blocks), task=message.task))
    return merged


def sort_tool_results(messages: list[Message]) -> list[Message]:
    """Tool results in the order of the calls they answer; text blocks stay where they are, unknown
    calls count as 0.
    """
    call_order: dict[str, int] = {}
    result = []
    for message in messages:
        if message.role == "assistant" and message.tool_calls:
            call_order = {
                call.call_id: index for index, call in enumerate(message.tool_calls) if call.call_id
            }
        elif message.role == "user" and call_order:
            message = replace(message, blocks=_sorted_blocks(message, call_order))
        result.append(message)
    return result


def _sorted_blocks(message: Message, call_order: dict[str, int]) -> list:
    results = [block for block in message.blocks if isinstance(block, ToolResult)]
    in_call_order = iter(sorted(results, key=lambda block: call_order.get(block.call_id, 0)))
    return [
        next(in_call_order) if isinstance(block, ToolResult) else block for block in message.blocks
    ]


def last_user_index(messages: list[Message]) -> int:
    """Index of the last user or developer message, -1 if there is none."""
    return max(
        (index for index, message in enumerate(messages) if message.role in ("user", "developer")),
        default=-1,
    )


def drop_old_developers(messages: list[Message]) -> list[Message | None]:
    """Before the last user message: developer and unknown messages become None. The reasoning of
    assistants there is left out when they are rendered.
    """
    last_user = last_user_index(messages)
    return [
        message if index >= last_user or message.role in _ROLES_ALWAYS_KEPT else None
        for index, message in enumerate(messages)
    ]
