"""A conversation and an answer behind it; the other tests of both are in ``test_state``."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.cli.conversation import Conversation, answered, conversation_notes
from dsv4.errors import UserError

ASKED = {"role": "user", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
OTHER = {"type": "function", "function": {"name": "g", "arguments": "{}"}}


def test_an_answer_is_a_message_of_its_own_behind_all_but_an_open_one() -> None:
    answer = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
    assert answered([ASKED], answer) == [ASKED, answer]
    result = {"role": "tool", "content": "c"}
    assert answered([ASKED, answer, result], answer) == [ASKED, answer, result, answer]


def test_an_open_message_keeps_its_calls_and_fields_and_gets_those_of_the_answer() -> None:
    begun = {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "r",
        "tool_calls": [CALL],
        "wo_eos": True,
    }
    kept = dict(begun)
    answer = {"role": "assistant", "content": "c", "tool_calls": [OTHER]}
    whole = {"role": "assistant", "content": "bc", "reasoning_content": "r"}
    assert answered([ASKED, begun], answer) == [ASKED, {**whole, "tool_calls": [CALL, OTHER]}]
    assert begun == kept
    nothing = {"role": "assistant", "content": None}
    assert answered([ASKED, nothing], {**answer, "content": None}) == [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [OTHER]},
    ]


def test_notes_have_the_tokens_that_are_in_no_cache() -> None:
    notes = conversation_notes([{"role": "user", "content": "Grüße"}], (5, 6, 7), 1)
    assert json.loads(notes["unprocessed_token_ids"]) == [6, 7]
    assert json.loads(notes["messages"]) == [{"role": "user", "content": "Grüße"}]
    assert conversation_notes(None, [5], 1) == {"unprocessed_token_ids": "[]"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Conversation]:
    """The conversation of a file ``state`` with two tokens and ``notes``; ids are below 50."""

    def conversation(**notes: str) -> Conversation:
        saved = SimpleNamespace(path=Path("state"), token_ids=[1, 2], notes=notes)
        monkeypatch.setattr("dsv4.cli.conversation.SavedState.open", lambda _: saved)
        return Conversation.read(Path("state"), 50)

    return conversation


def test_a_state_without_notes_is_plain_text(read: Callable[..., Conversation]) -> None:
    assert (read().token_ids, read().messages) == ([1, 2], None)
    with pytest.raises(UserError, match="^--load-state: state: found plain text, expected a con"):
        read().chat_messages()


def test_what_was_noted_is_read_back(read: Callable[..., Conversation]) -> None:
    found = read(**conversation_notes([ASKED], [1, 2, 49], 2))
    assert (found.token_ids, found.messages) == ([1, 2, 49], [ASKED])
    assert found.chat_messages() == [ASKED]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("messages", "[5]", "state: notes.messages: found no objects, expected messages"),
        ("messages", "{}", "state: notes.messages: found {}, expected a list"),
        ("messages", "null", "state: notes.messages: found None, expected a list"),
        ("messages", "[", r"state: notes.messages: not valid JSON \("),
        ("messages", "[" * 100_000, r"state: notes.messages: not valid JSON \("),
        ("unprocessed_token_ids", "5", "state: notes.unprocessed_token_ids: found 5, expected a"),
        ("unprocessed_token_ids", "[50]", "state: token_ids: found 50, expected "),
        ("unprocessed_token_ids", '["a"]', "state: token_ids: found "),
    ],
)
def test_wrong_notes_are_named(
    read: Callable[..., Conversation], name: str, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        read(**{name: text})


@pytest.mark.parametrize(
    ("role", "message"),
    [("king", r"notes.messages\[0\]: unknown role 'king'"), (5, r"notes.messages\[0\].role is 5")],
)
def test_messages_that_cannot_be_encoded_are_named(
    read: Callable[..., Conversation], role: object, message: str
) -> None:
    found = read(messages=json.dumps([{"role": role, "content": "a"}]))
    with pytest.raises(UserError, match=f"^/load: state: {message}"):
        found.chat_messages("/load")
