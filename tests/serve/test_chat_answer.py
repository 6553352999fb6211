"""What the engine says as a chat's message: several calls, calls that are cut off, stop strings."""

from collections.abc import Sequence
from typing import Any

import pytest

from dsv4 import SamplingParams
from dsv4.demo import CHECKPOINT
from dsv4.encoding import Tokenizer
from dsv4.logprobs import TokenLogprobs
from dsv4.serve.answering import Ended, PromptRead, Question, TokenSaid
from dsv4.serve.asked_chat import ChatAsked
from dsv4.serve.chat import ChatAnswer

DSML = "｜DSML｜"
OPEN = f"\n\n<{DSML}tool_calls>\n"
CLOSE = f"\n</{DSML}tool_calls>"


def call(city: str) -> str:
    parameter = f'<{DSML}parameter name="city" string="true">{city}</{DSML}parameter>'
    return f'<{DSML}invoke name="weather">\n{parameter}\n</{DSML}invoke>'


def answer(
    pieces: Sequence[str], by: str, one_call: bool = False, no_call: bool = False
) -> tuple[dict, list[dict]]:
    """The whole choice, and the deltas of the stream."""
    question = Question([1, 2], 9, SamplingParams(), (), frozenset())
    asked = ChatAsked(question, "chat", [], "", one_call, no_call)
    made = ChatAnswer(asked, "m", Tokenizer(CHECKPOINT))
    said = [PromptRead(1), *(TokenSaid(5, text, None) for text in pieces), Ended("", by)]
    chunks = [chunk for one in said for chunk in made.feed(0, one)]
    return made.response()["choices"][0], [chunk["choices"][0]["delta"] for chunk in chunks]


def started(deltas: list[dict[str, Any]]) -> list[int]:
    """The indices of the calls that a stream begins."""
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    return [one["index"] for one in calls if "id" in one]


@pytest.mark.parametrize("one_call", [False, True])
def test_of_several_calls_all_or_the_first(one_call: bool) -> None:
    text = f"Hm.{OPEN}{call('Rome')}\n{call('Oslo')}{CLOSE}"
    choice, deltas = answer(text, "eos", one_call)
    cities = [made["function"]["arguments"] for made in choice["message"]["tool_calls"]]
    assert cities == ['{"city": "Rome"}', '{"city": "Oslo"}'][: 1 if one_call else 2]
    assert started(deltas) == [0, 1][: 1 if one_call else 2]
    told = {one["index"] for delta in deltas for one in delta.get("tool_calls", ())}
    assert told == set(started(deltas))
    streamed = [
        one["function"]["arguments"]
        for delta in deltas
        for one in delta.get("tool_calls", ())
        if one["index"] == 0
    ]
    assert "".join(streamed) == '{"city": "Rome"}'
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hm.", "tool_calls")


def test_where_none_is_chosen_a_call_is_text() -> None:
    for text in (f"Hm.{OPEN}{call('Rome')}{CLOSE}", f"a{OPEN}{CLOSE}".replace(DSML, "")):
        choice, deltas = answer(text, "eos", no_call=True)
        assert "tool_calls" not in choice["message"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "".join(delta.get("content", "") for delta in deltas) == text


def test_without_tools_damaged_tags_are_text() -> None:
    text = f"Hm.{OPEN}{call('Rome')}{CLOSE}".replace(DSML, "|DSML|")
    choice, _ = answer(text, "eos")
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_call_that_is_cut_off_is_none() -> None:
    choice, deltas = answer([OPEN, call("Rome")[:-20]], "length")
    assert "tool_calls" not in choice["message"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert started(deltas) == [0]


@pytest.mark.parametrize("one_call", [False, True])
def test_a_stop_string_inside_the_second_call_is_no_end_of_calls(one_call: bool) -> None:
    choice, deltas = answer([OPEN, call("Rome"), "\n", call("Oslo")[:-20]], "stop", one_call)
    assert len(choice["message"]["tool_calls"]) == 1
    assert started(deltas) == [0, 1][: 1 if one_call else 2]
    assert choice["finish_reason"] == ("tool_calls" if one_call else "stop")


def test_a_call_that_the_model_ends_early_is_one() -> None:
    choice, deltas = answer([f'{OPEN}<{DSML}invoke name="weather">\n'], "eos")
    made = [one["function"] for one in choice["message"]["tool_calls"]]
    assert made == [{"name": "weather", "arguments": "{}"}]
    assert (started(deltas), choice["finish_reason"]) == ([0], "tool_calls")


def test_what_was_held_back_is_said_before_the_end_of_the_model() -> None:
    question = Question([1, 2], 9, SamplingParams(), (), frozenset())
    opening = f'{OPEN}<{DSML}invoke name="weather">\n'
    asked = ChatAsked(question, "chat", [], opening, False, False)
    made = ChatAnswer(asked, "m", Tokenizer(CHECKPOINT))
    deltas = [chunk["choices"][0]["delta"] for chunk in made.feed(0, PromptRead(1))]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert started(deltas) == [0]
    rest = call("Rome").partition("\n")[2] + CLOSE
    made.feed(0, Ended(rest, "eos"))
    choice = made.response()["choices"][0]
    [function] = [one["function"] for one in choice["message"]["tool_calls"]]
    assert function == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert (choice["logprobs"], "reasoning_content" in choice["message"]) == (None, False)


def test_a_stop_string_leaves_what_was_held_back_as_text() -> None:
    choice, deltas = answer(["a", "b\n\n", "<"], "stop")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab\n\n<", "stop")
    assert "".join(delta.get("content", "") for delta in deltas) == "ab\n\n<"


def test_what_was_held_back_is_told_in_its_order() -> None:
    """Behind it the parser holds back what might begin a call."""
    question = Question([1, 2], 9, SamplingParams(), (), frozenset())
    asked = ChatAsked(question, "chat", [], "", False, False)
    made = ChatAnswer(asked, "m", Tokenizer(CHECKPOINT))
    chunks = made.feed(0, Ended("a <", "length"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("content") for delta in deltas] == ["a ", "<", None]


def test_an_answer_and_its_chunks_have_the_fields_of_the_api() -> None:
    """Those too that a client may read and the one of the other tests does not."""
    tokenizer = Tokenizer(CHECKPOINT)
    [token] = tokenizer.encode("1")
    entry = {"token": "1", "bytes": [49], "logprob": -0.5}
    noted = {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}
    question = Question([1, 2, 3], 9, SamplingParams(logprobs=1), (), frozenset())
    made = ChatAnswer(ChatAsked(question, "thinking", [], "", False, False), "m", tokenizer)
    said = TokenSaid(token, "1", TokenLogprobs(token, -0.5, ((token, -0.5),)))
    chunks = made.feed(0, PromptRead(2)) + made.feed(0, said)
    chunks += made.feed(0, Ended("</think>2", "stop"))
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        for delta, logprobs, reason in (
            ({"role": "assistant", "content": ""}, None, None),
            ({"reasoning_content": "1"}, noted, None),
            ({"content": "2"}, None, None),
            ({}, None, "stop"),
        )
    ]
    head = {name: chunks[0][name] for name in ("id", "created", "model")}
    assert head["model"] == "m"
    assert {type(head["id"]), type(head["created"])} == {str, int}
    for chunk in chunks:
        given = {**head, "object": "chat.completion.chunk", "choices": chunk["choices"]}
        assert chunk == given
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    last = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    assert made.usage_chunk() == last
    message = {"role": "assistant", "content": "2", "refusal": None, "reasoning_content": "1"}
    choice = {"index": 0, "message": message, "logprobs": noted, "finish_reason": "stop"}
    whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    assert made.response() == whole


def test_the_chunks_of_a_call_have_the_fields_of_the_api() -> None:
    choice, deltas = answer([f"{OPEN}{call('Rome')}\n{call('Oslo')}{CLOSE}"], "eos")
    told = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert [sorted(one) for one in told if "id" in one] == [["function", "id", "index", "type"]] * 2
    assert {one["type"] for one in told if "id" in one} == {"function"}
    spoken = [("weather", '{"city": "Rome"}'), ("weather", '{"city": "Oslo"}')]
    for index, (name, arguments) in enumerate(spoken):
        functions = [one["function"] for one in told if one["index"] == index]
        assert functions[0] == {"name": name, "arguments": ""}
        assert "".join(one["arguments"] for one in functions) == arguments
    calls = choice["message"]["tool_calls"]
    assert len({one["id"] for one in (*calls, *told) if "id" in one}) == 4
    assert [one["type"] for one in calls] == ["function", "function"]
    assert choice["message"]["content"] is None
