"""OpenAI-style chat files → the message list of `encode_messages` (model.md#messages)."""

from pathlib import Path

from .json_text import parse_json
from .messages import parse_tools


def load_messages(path: str | Path) -> list[dict]:
    """Messages of a JSON file: a list of messages, or a request object with messages, tools and
    response_format.

    Raises FileNotFoundError, or ValueError that names the file. Other fields of a request object
    are not for the encoder and are left out; what the messages hold is checked by
    `encode_messages`.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such messages file")
    try:
        return messages_of_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def messages_of_json(text: str | bytes) -> list[dict]:
    """The messages of a chat file's content, as `load_messages` gives them. ValueError."""
    return messages_of_request(parse_json(text))


def messages_of_request(request: object) -> list[dict]:
    """The messages of a parsed chat request, its tools and response format put where the encoder
    reads them.

    They are attached to the leading system or developer message; where there is none, an empty
    system message is put in front. The request is not changed. ValueError if it is neither a list
    nor an object with a list of messages.
    """
    if isinstance(request, list):
        return request
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise ValueError('expected a list of messages or an object with a list "messages"')
    messages = list(request["messages"])
    parse_tools(request.get("tools"), "tools")  # Where they go, they would be called by that name.
    response_format = _response_schema(request.get("response_format"))
    extra = {"tools": request.get("tools"), "response_format": response_format}
    extra = {key: value for key, value in extra.items() if value}
    if not extra:
        return messages
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": "", **extra}, *messages]
    for key in extra:
        if first.get(key):
            raise ValueError(f"{key} is given both in the request and in its first message")
    return [{**first, **extra}, *messages[1:]]


def _response_schema(response_format: object) -> object:
    """The part of an OpenAI response_format that the model sees: nothing for plain text, the schema
    itself for a schema.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise ValueError(f"response_format is {response_format!r:.80}, expected an object")
    if response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            raise ValueError(
                'response_format of type json_schema lacks "json_schema": {"schema": {...}}'
            )
        return schema
    return response_format
