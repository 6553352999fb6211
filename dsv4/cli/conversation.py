"""A conversation between two runs of the driver: what ``--save-state`` notes for
``--load-state``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.checkpoint.state_file import SavedState
from dsv4.encoding import content_text, encode_messages
from dsv4.errors import UserError, shorten
from dsv4.token_ids import check_ids


@dataclass(frozen=True)
class Conversation:
    """``token_ids``: everything so far, those of ``saved`` and what was said behind them.
    ``messages``: the same in the OpenAI format, None for plain text.
    """

    saved: SavedState
    token_ids: list[int]
    messages: list[dict] | None

    @classmethod
    def read(cls, path: Path, vocab_size: int) -> "Conversation":
        """The conversation of a state file. Raises ``UserError`` that names the file."""
        saved = SavedState.open(path)
        messages = _noted(saved, "messages")
        if messages is not None and not all(isinstance(message, dict) for message in messages):
            raise UserError(f"{path}: notes.messages: found no objects, expected messages")
        ids = saved.token_ids + (_noted(saved, "unprocessed_token_ids") or [])
        check_ids(ids, vocab_size, f"{path}: token_ids", at_least=0)
        return cls(saved, ids, messages)

    def chat_messages(self, asked_by: str = "--load-state") -> list[dict]:
        """The messages. Raises ``UserError`` for plain text, and for messages that cannot be
        encoded, as a state of the library may have them; ``asked_by``: what names the file.
        """
        if self.messages is None:
            raise UserError(
                f"{asked_by}: {self.saved.path}: found plain text, expected a conversation; "
                "a run with --raw or --token-ids goes on with it"
            )
        try:
            encode_messages(self.messages, "chat")
        except ValueError as error:
            raise UserError(f"{asked_by}: {self.saved.path}: notes.{error}") from None
        return self.messages


def conversation_notes(
    messages: list[dict] | None, token_ids: Sequence[int], position: int
) -> dict[str, str]:
    """What to note of ``messages``, None for plain text, when ``position`` of all ``token_ids`` are
    in the caches.
    """
    notes = {"unprocessed_token_ids": json.dumps(list(token_ids[position:]))}
    if messages is not None:
        notes["messages"] = json.dumps(messages, ensure_ascii=False)
    return notes


def answered(messages: list[dict], answer: dict) -> list[dict]:
    """The messages with the answer, which may go on with the last of them."""
    *earlier, last = messages
    if last["role"] != "assistant":
        return [*messages, answer]
    whole = {key: value for key, value in last.items() if key != "wo_eos"}
    # One string, as the prompt had it: the answer behind parts would be a part of its own.
    begun = content_text(last.get("content"), "content")
    whole["content"] = begun + (answer.get("content") or "")
    whole["tool_calls"] = [*(last.get("tool_calls") or []), *(answer.get("tool_calls") or [])]
    return [*earlier, whole]


def _noted(saved: SavedState, name: str) -> list[Any] | None:
    if name not in saved.notes:
        return None
    try:
        value = json.loads(saved.notes[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{saved.path}: notes.{name}: not valid JSON ({error})") from None
    if not isinstance(value, list):
        raise UserError(f"{saved.path}: notes.{name}: found {shorten(value)}, expected a list")
    return value
