"""What of messages the chat encoding would leave out. What else is wrong the encoder finds."""

from dsv4.errors import UserError, shorten

# Whose messages have them (model.md#messages).
_ROLES_OF = {
    "tools": ("system", "developer"),
    "response_format": ("system", "developer"),
    "reasoning_content": ("assistant",),
    "tool_calls": ("assistant",),
    "content_blocks": ("user",),
}
# The fields of a chat request that say something about the prompt.
REQUEST = ("messages", "tools", "response_format")


def check_request(request: object) -> None:
    """Raises ``UserError`` for a field of a chat request that says nothing about the prompt."""
    for key in request if isinstance(request, dict) else ():
        if key not in REQUEST:
            raise UserError(f"found a field {shorten(key)}, expected only {', '.join(REQUEST)}")


def check_roles(messages: list[dict], source: str) -> None:
    """Raises ``UserError`` for what belongs to messages of another role: nothing would read it."""
    for index, message in enumerate(messages):
        for key, roles in _ROLES_OF.items() if isinstance(message, dict) else ():
            role = message.get("role")
            if message.get(key) and role not in roles:
                found = f"found in a message of {shorten(role)}, expected {' or '.join(roles)}"
                raise UserError(f"{source}messages[{index}].{key}: {found}")


def check_parts(messages: list[dict], source: str) -> None:
    """Raises ``UserError`` for a part that is no text, of which the chat encoding only says that
    there was one, and for a content beside the blocks that are read in its place.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        where = f"{source}messages[{index}]"
        content = message.get("content")
        blocks = message.get("content_blocks")
        if content is not None and blocks is not None:
            raise UserError(f"{where}.content: found with content_blocks, expected one of them")
        _check_texts(content, f"{where}.content")
        for place, block in enumerate(blocks if isinstance(blocks, list) else []):
            block_where = f"{where}.content_blocks[{place}]"
            if isinstance(block, dict) and block.get("type") == "tool_result":
                _check_texts(block.get("content"), f"{block_where}.content")
            else:
                _check_text(block, block_where)


def _check_texts(content: object, where: str) -> None:
    for place, part in enumerate(content if isinstance(content, list) else []):
        _check_text(part, f"{where}[{place}]")


def _check_text(part: object, where: str) -> None:
    if not isinstance(part, dict):
        return
    kind = part.get("type")
    if kind != "text":
        raise UserError(f"{where}: found {shorten(kind)}, expected a part of type text")
    if "text" not in part:
        raise UserError(f"{where}: found no text, expected a string")
