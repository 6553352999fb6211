"""``/v1/chat/completions`` by the ``openai`` client: texts, streams, tools, reasoning, logprobs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4 import SamplingParams
from dsv4.cli.stream import parse_answer
from dsv4.encoding import encode_messages
from dsv4.serve.asked_chat import chat_question
from dsv4.serve.fields import ChatFields, read_fields
from tests.serve.running import FRANCE, MODEL, STORY, SUM, Running

pytestmark = pytest.mark.slow

WEATHER: dict[str, Any] = json.loads(Path("docs/examples/weather.json").read_text())
THINKING = {"thinking": {"type": "enabled"}}


def ask(demo: Running, messages: Any, **fields: Any) -> Any:
    create = demo.client().chat.completions.create
    return create(model=MODEL, messages=messages, **fields)


def streamed(demo: Running, messages: Any, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas of a stream make, and its chunks."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    chunks = list(ask(demo, messages, stream=True, **fields))
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                else:
                    made = message["tool_calls"][call["index"]]
                    made["function"]["arguments"] += call["function"]["arguments"]
    return message, chunks


def expected(demo: Running, messages: list[dict], mode: str) -> dict[str, Any]:
    """The message that the engine and the parser make of the same conversation."""
    tokenizer = demo.service.files.tokenizer
    ids = tokenizer.encode(encode_messages(messages, mode))
    tokens = demo.engine.generate(ids, 100, SamplingParams(temperature=0))
    return parse_answer(tokenizer.decode(list(tokens)), True, mode, []).message


@pytest.mark.parametrize(("messages", "mode"), [(FRANCE, "chat"), (SUM, "thinking")])
def test_an_answer_is_that_of_the_engine_streamed_or_not(
    demo: Running, messages: list[dict], mode: str
) -> None:
    wanted = expected(demo, messages, mode)
    fields = {"extra_body": THINKING} if mode == "thinking" else {}
    answer = ask(demo, messages, **fields)
    message, chunks = streamed(demo, messages, stream_options={"include_usage": True}, **fields)
    whole = answer.choices[0].message.model_dump()
    assert whole["content"] == message["content"] == wanted["content"] != ""
    reasoning = wanted["reasoning_content"]
    assert whole.get("reasoning_content", "") == message["reasoning_content"] == reasoning
    assert bool(reasoning) == (mode == "thinking")
    ends = [answer.choices[0].finish_reason, chunks[-2].choices[0].finish_reason]
    assert ends == ["stop", "stop"]
    assert len(chunks) > 4
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    used = chunks[-1].usage
    assert used.completion_tokens == answer.usage.completion_tokens > 0
    assert used.total_tokens == used.completion_tokens + used.prompt_tokens


def test_a_tool_call_streamed_or_not_and_the_turn_behind_its_result(demo: Running) -> None:
    answer = ask(demo, **WEATHER)
    [call] = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
        "tool_calls",
        None,
    )
    message, chunks = streamed(demo, **WEATHER)
    [made] = message["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": call.function.arguments}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    said = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    turns = [*WEATHER["messages"], said, result]
    after = ask(demo, turns, tools=WEATHER["tools"])
    assert "21" in after.choices[0].message.content
    # Prompt and call are there, but for the tokens behind the call.
    reused = after.usage.prompt_tokens_details.cached_tokens
    assert reused == answer.usage.total_tokens


def test_tool_choice_forces_a_call_or_hides_the_tools(demo: Running) -> None:
    tools = WEATHER["tools"]
    required = ask(demo, FRANCE, tools=tools, tool_choice="required")
    calls = required.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]
    named = {"type": "function", "function": {"name": "get_weather"}}
    message, _ = streamed(demo, FRANCE, tools=tools, tool_choice=named)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    hidden = ask(demo, **WEATHER, tool_choice="none", max_tokens=1)
    plain = ask(demo, WEATHER["messages"], max_tokens=1)
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_of_a_message_are_forced_and_hidden_too(demo: Running, role: str) -> None:
    system = {"role": role, "content": "Be brief.", "tools": WEATHER["tools"]}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = ask(demo, [system, *FRANCE], tool_choice=choice).choices[0]
        assert [call.function.name for call in answer.message.tool_calls] == ["get_weather"]
    plain = {"role": role, "content": "Be brief."}
    asked = [
        chat_question(demo.service, read_fields(ChatFields, {"messages": messages, **fields}))
        for messages, fields in (
            ([plain, *FRANCE], {}),
            ([system, *FRANCE], {"tool_choice": "none"}),
            ([system, *FRANCE], {"tool_choice": "auto"}),
        )
    ]
    assert asked[1].question.token_ids == asked[0].question.token_ids
    assert (asked[1].no_call, asked[1].tools) == (True, [])
    assert (asked[2].no_call, asked[2].tools) == (False, WEATHER["tools"])


@pytest.mark.parametrize(
    ("body", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "max"}}, True),
    ],
)
def test_reasoning_is_switched_by_any_of_the_usual_names(
    demo: Running, body: dict[str, Any], thinks: bool
) -> None:
    answer = ask(demo, SUM, extra_body=body, max_completion_tokens=4)
    message = answer.choices[0].message.model_dump()
    assert bool(message.get("reasoning_content")) == thinks
    assert answer.choices[0].finish_reason == ("length" if thinks else "stop")


@pytest.mark.parametrize("body", [{"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}])
def test_reasoning_is_switched_off_where_the_server_has_it_on(
    demo: Running, body: dict[str, Any]
) -> None:
    service = replace(demo.service, thinks=True)
    modes = [
        chat_question(service, read_fields(ChatFields, {"messages": SUM, **fields})).mode
        for fields in ({}, body)
    ]
    assert modes == ["thinking", "chat"]


def test_a_later_prompt_has_the_reasoning_of_this_answer_only_with_tools(demo: Running) -> None:
    forgets = [
        chat_question(
            demo.service, read_fields(ChatFields, {"messages": SUM, **fields})
        ).question.forgets
        for fields in ({}, THINKING, {**THINKING, "tools": WEATHER["tools"]})
    ]
    assert forgets == [False, True, False]


def test_logprobs_of_every_token_streamed_or_not(demo: Running) -> None:
    fields = {"logprobs": True, "top_logprobs": 3}
    answer = ask(demo, FRANCE, **fields)
    entries = answer.choices[0].logprobs.content
    assert "".join(one.token for one in entries) == answer.choices[0].message.content
    assert bytes(byte for one in entries for byte in one.bytes).decode() == "".join(
        one.token for one in entries
    )
    for one in entries:
        assert [top.token for top in one.top_logprobs][:1] == [one.token]
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob <= 0
    _, chunks = streamed(demo, FRANCE, **fields)
    assert chunks[0].choices[0].logprobs is None  # No token yet.
    noted = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    together = [one for part in noted for one in part]
    assert [one.token for one in together] == [one.token for one in entries]
    assert [one.logprob for one in together] == pytest.approx(
        [one.logprob for one in entries], abs=1e-4
    )


def test_a_stop_string_ends_the_answer_before_it(demo: Running) -> None:
    whole = ask(demo, FRANCE).choices[0].message.content
    begin, _, _ = whole.partition("of Fr")
    for stop in ("of Fr", ["nothing", "of Fr"]):
        answer = ask(demo, FRANCE, stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            begin,
            "stop",
        )
    message, _ = streamed(demo, FRANCE, stop="of Fr")
    assert message["content"] == begin


def test_limits_end_an_answer_with_length(demo: Running) -> None:
    answer = ask(demo, FRANCE, max_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    many = ask(demo, FRANCE, max_completion_tokens=10**9)
    assert many.choices[0].finish_reason == "stop"


def test_behind_an_ignored_end_the_answer_goes_on(demo: Running) -> None:
    fields = {"max_tokens": 20, "extra_body": {"ignore_eos": True, "temperature": 0}}
    tokenizer = demo.service.files.tokenizer
    ids = tokenizer.encode(encode_messages(FRANCE, "chat"))
    tokens = demo.engine.generate(ids, 20, SamplingParams(temperature=0), ())
    said = [token for token in tokens if token != tokenizer.eos_id]
    assert len(said) < 20
    wanted = parse_answer(tokenizer.decode(said), False, "chat", []).message["content"]
    answer = ask(demo, FRANCE, **fields).choices[0]
    assert (answer.message.content, answer.finish_reason) == (wanted, "length")
    assert streamed(demo, FRANCE, **fields)[0]["content"] == wanted


def test_sampling_follows_its_fields_and_the_seed_repeats_it(demo: Running) -> None:
    def sampled(**fields: Any) -> str:
        answer = ask(demo, STORY, max_tokens=6, **fields)
        return answer.choices[0].message.content

    hot = {"temperature": 3.0}
    found = [sampled(**hot, seed=seed) for seed in range(3)]
    assert sampled(**hot, seed=2) == found[2]
    assert len(set(found)) > 1
    greedy = sampled()
    assert sampled(**hot, extra_body={"top_k": 1}) == greedy
    assert sampled(**hot, top_p=1e-9) == greedy
    assert sampled(**hot, extra_body={"min_p": 1.0}) == greedy


def test_the_next_turn_reads_only_what_is_new(demo: Running) -> None:
    first = ask(demo, FRANCE)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(demo, [*FRANCE, said, *SUM])
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
    assert second.choices[0].message.content
    other = ask(demo, SUM)
    # What all prompts begin with.
    assert other.usage.prompt_tokens_details.cached_tokens <= 4


def test_the_next_turn_goes_on_behind_a_prompt_whose_reasoning_is_dropped(demo: Running) -> None:
    first = ask(demo, FRANCE, extra_body=THINKING)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(demo, [*FRANCE, said, *SUM], extra_body=THINKING)
    # All but `<think>`, in whose place the next prompt has `</think>`.
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
