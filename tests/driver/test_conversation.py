"""A conversation and an answer behind it; the other tests of both are in ``test_state``."""

import json

from dsv4.cli.conversation import answered, conversation_notes

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
