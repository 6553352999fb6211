"""Messages that tests of the prompt format share."""

from typing import Any

HI = {"role": "user", "content": "hi"}


def call(name: Any = "f", arguments: Any = "{}", call_id: str | None = None) -> dict:
    result: dict = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return result if call_id is None else {"id": call_id, **result}
