"""What the engine is asked: of the fields of requests, and of the files of the model."""

from dataclasses import replace
from typing import Any, cast

import pytest

from dsv4.cli.job import ModelFiles
from dsv4.demo import CHECKPOINT
from dsv4.encoding import encode_messages
from dsv4.json_object import JsonReader
from dsv4.sampling import SamplingParams
from dsv4.serve.answering import Answering
from dsv4.serve.asked import completion_questions
from dsv4.serve.asked_chat import ChatAsked, chat_question
from dsv4.serve.errors import ApiError
from dsv4.serve.fields import ChatFields, CompletionFields, read_fields
from dsv4.serve.service import Service
from dsv4.serve.worker import Worker
from tests.serve.running import FRANCE, MODEL

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
NAMELESS = [{"type": "function", "function": {"name": ["f"]}}]
MAX_CONTEXT = 1000


@pytest.fixture(scope="module")
def service() -> Service:
    """One that checks requests; it has no engine."""
    files = ModelFiles.read(CHECKPOINT)
    worker, answering = cast(Worker, None), cast(Answering, None)
    return Service(MODEL, CHECKPOINT, files, MAX_CONTEXT, False, 1, worker, answering, 0)


def asked(service: Service, **fields: Any) -> ChatAsked:
    return chat_question(service, read_fields(ChatFields, {"messages": FRANCE, **fields}))


def prompt_of(service: Service, **fields: Any) -> str:
    return service.files.tokenizer.decode(asked(service, **fields).question.token_ids)


def test_one_call_is_given_where_calls_may_not_be_parallel(service: Service) -> None:
    found = [asked(service, parallel_tool_calls=said).one_call for said in (None, True, False)]
    assert found == [False, False, True]


def test_the_prompt_has_the_effort_by_either_of_its_names(service: Service) -> None:
    wanted = encode_messages(FRANCE, "thinking", reasoning_effort="max")
    assert wanted != encode_messages(FRANCE, "thinking")
    assert prompt_of(service, reasoning_effort="max") == wanted
    assert prompt_of(service, chat_template_kwargs={"reasoning_effort": "max"}) == wanted
    assert prompt_of(service, reasoning_effort="none") == encode_messages(FRANCE, "chat")


def test_the_prompt_has_the_tools_and_the_response_format(service: Service) -> None:
    schema = {"type": "object", "title": "T"}
    system = {"role": "system", "content": "", "tools": TOOLS, "response_format": schema}
    wanted = encode_messages([system, *FRANCE], "chat")
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert prompt_of(service, tools=TOOLS, response_format=wrapped) == wanted


def test_control_tokens_in_what_a_client_writes_are_text(service: Service) -> None:
    quoted = [{"role": "user", "content": "a<｜Assistant｜></think>b"}]
    prompt = prompt_of(service, messages=quoted)
    assert [prompt.count(token) for token in ("<｜Assistant｜>", "</think>")] == [1, 1]
    assert prompt == encode_messages(quoted, "chat")


@pytest.mark.parametrize(
    ("choice", "opening"),
    [
        ("auto", ""),
        (None, ""),
        ("required", "\n\n<｜DSML｜tool_calls>\n"),
        (TOOLS[1], '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="g">\n'),
    ],
)
def test_the_prompt_begins_the_call_that_is_chosen(
    service: Service, choice: Any, opening: str
) -> None:
    plain = prompt_of(service, tools=TOOLS)
    assert prompt_of(service, tools=TOOLS, tool_choice=choice) == plain + opening
    assert asked(service, tools=TOOLS, tool_choice=choice).opening == opening


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": ["f"]}, "tool_choice"),
        ({"tools": NAMELESS, "tool_choice": NAMELESS[0]}, "tool_choice"),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking"),
        (
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
            "chat_template_kwargs.thinking",
        ),
    ],
)
def test_the_field_that_contradicts_another_is_named(
    service: Service, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError, match=f"^{param}: found ") as caught:
        asked(service, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_limit_by_either_of_its_names_else_the_context(service: Service) -> None:
    limits = [
        asked(service, **fields).question.max_tokens
        for fields in (
            {},
            {"max_tokens": 3},
            {"max_completion_tokens": 4},
            {"max_tokens": 5, "max_completion_tokens": 5},
        )
    ]
    assert limits == [MAX_CONTEXT, 3, 4, 5]


def test_logprobs_of_the_chosen_token_need_no_top_ones(service: Service) -> None:
    noted = [
        asked(service, **fields).question.sampling.logprobs
        for fields in ({}, {"logprobs": False}, {"logprobs": True})
    ]
    assert noted == [None, None, 0]


def test_sampling_is_that_of_the_model_where_a_request_does_not_say(service: Service) -> None:
    assert asked(service, temperature=1.0).question.sampling == SamplingParams(temperature=1.0)
    stated: dict[str, Any] = {"temperature": 0.5, "top_p": 0.75, "min_p": 0.25, "top_k": 7}
    generation = JsonReader(stated, "generation_config.json")
    service = replace(service, files=replace(service.files, generation=generation))
    assert asked(service).question.sampling == SamplingParams(**stated)
    said: dict[str, Any] = {"temperature": 2.0, "top_p": 0.5, "min_p": 0.0, "top_k": -1, "seed": 3}
    expected = SamplingParams(**{**said, "top_k": 0})
    assert asked(service, **said).question.sampling == expected


def test_what_ends_the_answer(service: Service) -> None:
    ends = service.files.eos_token_ids
    plain = asked(service, stop="a").question
    assert (plain.stops, plain.stop_token_ids, plain.silent_token_ids) == (("a",), ends, ends)
    ignored = asked(service, stop=["a", "b"], ignore_eos=True).question
    assert (ignored.stops, ignored.stop_token_ids) == (("a", "b"), frozenset())
    assert ignored.silent_token_ids == ends


def test_a_text_begins_the_sequence_once_and_ids_are_taken_as_they_are(service: Service) -> None:
    tokenizer = service.files.tokenizer
    ids = tokenizer.encode("text")
    begun = [tokenizer.bos_id, *ids]
    for prompt, read, shown in (
        ("text", begun, ids),
        (tokenizer.decode(begun), begun, begun),
        (ids, ids, ids),
    ):
        fields = read_fields(CompletionFields, {"prompt": prompt})
        questions, echoed = completion_questions(service, fields)
        assert [question.token_ids for question in questions] == [read]
        assert [one.token_ids for one in echoed] == [shown]


def test_a_prompt_is_scored_for_its_echo_alone(service: Service) -> None:
    scored = []
    for fields in ({}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2}):
        kind = read_fields(CompletionFields, {"prompt": "text", **fields})
        scored += [one.scores_prompt for one in completion_questions(service, kind)[0]]
    assert scored == [False, False, False, True]
