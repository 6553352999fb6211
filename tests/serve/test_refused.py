"""Wrong requests: a status, OpenAI's error object, and the field's name; the server goes on."""

import gzip
import json
from typing import Any

import httpx
import pytest

from dsv4.serve.asked import completion_questions
from dsv4.serve.fields import CompletionFields
from dsv4.serve.worker import Cancelled, Work
from tests.serve.running import FRANCE, MODEL, SUM, Running

pytestmark = pytest.mark.slow

CHAT = "/chat/completions"
TEXT = "/completions"
USER = {"messages": FRANCE}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BROKEN_TOOL = {"type": "function", "function": {"name": "\ud800", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
QUOTED_CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a\\"b": 1}'}}
QUOTED_TOOL = {"type": "function", "function": {"name": 'a"b', "parameters": {}}}
HIGH_EFFORT = {"chat_template_kwargs": {"reasoning_effort": "high"}}
HUGE_EFFORT = {"chat_template_kwargs": {"reasoning_effort": "huge"}}
NO_STREAM = {"stream": False, "stream_options": {"include_usage": True}}
VAST = "x" * 1000
LONG = {"messages": [{"role": "user", "content": "word " * 10_000}]}
HUGE = {"messages": [{"role": "user", "content": "word " * 190_000}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **fields}]}


def blocks(*given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content_blocks": list(given)}]}


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (CHAT, {}, "messages", "messages: found none"),
        (CHAT, {"messages": []}, "messages", "messages: found no messages"),
        (CHAT, {"messages": "hello"}, "messages", "messages: found 'hello', expected a valid list"),
        (CHAT, {"messages": [5]}, "messages.0", "messages.0: found 5"),
        (CHAT, message(role="king"), "messages", "unknown role 'king'"),
        (CHAT, message(role=5), "messages", "messages[0].role is 5"),
        (CHAT, message(role=VAST), "messages", "unknown role 'xxx"),
        (CHAT, message(role=[VAST]), "messages", "messages[0].role is ['xxx"),
        (CHAT, message(task=VAST), "messages", "messages[0].task is 'xxx"),
        (CHAT, {**USER, "reasoning_effort": VAST}, "reasoning_effort", "is 'xxx"),
        (TEXT, {"prompt": [10**1000]}, "prompt", "prompt: found 1000"),
        (CHAT, message(content=5), "messages", "messages[0].content is int"),
        (CHAT, message(content="\ud800"), "messages", "messages[0].content: found a lone surr"),
        (CHAT, message(content=[IMAGE]), "messages", "messages[0].content[0]: found 'image_url'"),
        (CHAT, blocks(IMAGE), "messages", "messages[0].content_blocks[0]: found 'image_url'"),
        (
            CHAT,
            blocks({"type": "tool_result", "content": [IMAGE]}),
            "messages",
            "messages[0].content_blocks[0].content[0]: found 'image_url'",
        ),
        (CHAT, message(response_format=TOOL), "messages", "messages[0].response_format: found in"),
        (CHAT, message(content_blocks=[]), "messages", "messages[0].content: found with content_b"),
        (CHAT, message(role="developer"), "messages", "of system at the end, expected a question"),
        (CHAT, message(role="assistant"), "messages", "found a message of assistant at the end"),
        (CHAT, {**USER, "max_token": 5}, "max_token", "max_token: found an unknown field"),
        (CHAT, {**USER, "\ud800": 5}, r"'\ud800'", r"'\ud800': found an unknown field"),
        (CHAT, {**USER, "a\nb": 5}, r"'a\nb'", r"'a\nb': found an unknown field"),
        (CHAT, {**USER, "": 5}, "''", "'': found an unknown field"),
        (CHAT, {**USER, "n": 2}, "n", "n: found 2, expected 1"),
        (CHAT, {**USER, "n": True}, "n", "n: found True, expected 1"),
        (CHAT, {**USER, "logit_bias": {"5": 1}}, "logit_bias", "logit_bias: found {'5': 1}"),
        (CHAT, {**USER, "frequency_penalty": 0.5}, "frequency_penalty", "found 0.5, expected 0"),
        (CHAT, {**USER, "suffix": "x"}, "suffix", "suffix: found 'x', expected '': it is not"),
        (CHAT, {**USER, "temperature": -1}, "temperature", "temperature: found -1, expected gr"),
        (CHAT, {**USER, "temperature": "1"}, "temperature", "temperature: found '1', expected a v"),
        (CHAT, {**USER, "temperature": True}, "temperature", "temperature: found True"),
        (CHAT, {**USER, "top_p": 0}, "top_p", "top_p: found 0"),
        (CHAT, {**USER, "seed": -1}, "seed", "seed: found -1"),
        (CHAT, {**USER, "seed": 2**63}, "seed", "seed: found"),
        *(
            (CHAT, {**USER, name: 0}, name, f"{name}: found 0, expected greater than or equal to 1")
            for name in ("max_tokens", "max_completion_tokens")
        ),
        (CHAT, {**USER, "max_tokens": 1.5}, "max_tokens", "max_tokens: found 1.5"),
        (
            CHAT,
            {**USER, "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "max_tokens: found another number",
        ),
        (CHAT, {**USER, "stop": ""}, "stop", "stop: found ''"),
        (CHAT, {**USER, "stop": ["a", 5]}, "stop", "stop: found ['a', 5]"),
        (CHAT, {**USER, "stop": "a\ud800"}, "stop", "stop: found a lone surrogate at character 1"),
        (CHAT, {**USER, "stop": ["a", "\ud800"]}, "stop", "stop[1]: found a lone surrogate at"),
        (CHAT, {**USER, "stop": ["a"] * 65}, "stop", "stop: found"),
        (CHAT, {**USER, "top_logprobs": 2}, "top_logprobs", "found without logprobs"),
        (CHAT, {**USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "found 21"),
        (CHAT, {**USER, "stream_options": {}}, "stream_options", "found without stream"),
        (CHAT, {**USER, **NO_STREAM}, "stream_options", "found without stream"),
        (CHAT, {**USER, "tools": [{"type": "x"}]}, "tools", 'tools[0] has no object "function"'),
        (CHAT, {**USER, "tools": [BROKEN_TOOL]}, "tools", "tools[0].function.name: found a lone"),
        (CHAT, {**USER, "tools": [QUOTED_TOOL]}, "tools", "tools[0].function.name: found 'a\"b'"),
        (
            CHAT,
            message(role="assistant", tool_calls=[QUOTED_CALL]),
            "messages",
            "messages[0].tool_calls[0].function.arguments: found 'a\"b', expected",
        ),
        (CHAT, {**USER, "tools": [{"\ud800": 1}]}, "tools", "tools: a key of tools[0]: found a"),
        (
            CHAT,
            {**USER, "response_format": {"type": "\ud800"}},
            "response_format",
            "response_format.type: found a lone surrogate",
        ),
        (CHAT, {**USER, "tool_choice": "required"}, "tool_choice", "found required without tools"),
        (CHAT, {**USER, "tools": [TOOL], "tool_choice": "f"}, "tool_choice", "found 'f', expected"),
        (
            CHAT,
            {**USER, "tools": [TOOL], "tool_choice": "required", "reasoning_effort": "high"},
            "tool_choice",
            "found with thinking",
        ),
        (CHAT, {**USER, "reasoning_effort": "huge"}, "reasoning_effort", "is 'huge'"),
        (CHAT, {**USER, "reasoning_effort": ""}, "reasoning_effort", "is ''"),
        (CHAT, {**USER, "reasoning_effort": "high", **HUGE_EFFORT}, "reasoning_effort", "'huge'"),
        (CHAT, {**USER, "reasoning_effort": "max", **HIGH_EFFORT}, "reasoning_effort", "another"),
        (CHAT, {**USER, "reasoning_effort": "none", **HIGH_EFFORT}, "reasoning_effort", "another"),
        (
            CHAT,
            {**USER, "reasoning_effort": "high", "thinking": {"type": "disabled"}},
            "reasoning_effort",
            "found thinking on, and off by thinking",
        ),
        (CHAT, {**USER, "thinking": {"type": "maybe"}}, "thinking.type", "found 'maybe'"),
        (CHAT, {**USER, "response_format": {"type": "json_schema"}}, "response_format", "lacks"),
        (TEXT, {}, "prompt", "prompt: found none"),
        (TEXT, {"prompt": ""}, "prompt", "prompt: found an empty text"),
        (TEXT, {"prompt": []}, "prompt", "prompt: found []"),
        (TEXT, {"prompt": [[]]}, "prompt", "prompt: found none, expected at least 1"),
        (TEXT, {"prompt": ["a", ""]}, "prompt", "prompt[1]: found an empty text"),
        (TEXT, {"prompt": ["a", "a\ud800"]}, "prompt", "prompt[1]: found a lone surrogate"),
        (TEXT, {"prompt": [[1], [2], [-3]]}, "prompt", "prompt[2]: found -3, expected ids from 0"),
        (TEXT, {"prompt": [[1], [1] * 9000]}, "prompt", "prompt[1]: found a prompt of 9000 tok"),
        (TEXT, {"prompt": ["a", "a " * 9000]}, "prompt", "prompt[1]: found a prompt of "),
        (TEXT, {"prompt": ["a", [1]]}, "prompt", "prompt: found ['a', [1]]"),
        (TEXT, {"prompt": [[]] * 2049}, "prompt", "prompt: found 2049 prompts, expected at mo"),
        (TEXT, {"prompt": [1, 10**6]}, "prompt", "prompt: found 1000000, expected ids from 0"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "prompt: found [1, 'a'], expected integers"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens: found 0 without echo"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "best_of: found 3"),
        (TEXT, {"prompt": "a", "messages": []}, "messages", "messages: found an unknown field"),
        (TEXT, {"prompt": [1] * 9000}, "prompt", "prompt: found a prompt of 9000 tokens, expec"),
        (CHAT, LONG, "messages", "messages: found a prompt of 2"),
        (CHAT, HUGE, "messages", "messages: found a prompt of at least "),
    ],
)
def test_a_wrong_field_is_named(
    demo: Running, path: str, body: dict[str, Any], param: str | None, text: str
) -> None:
    response = demo.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert text in error["message"]
    assert not error["message"].startswith("messages: messages")
    assert "\n" not in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "body: not valid JSON"),
        (b"{", 400, "body: not valid JSON"),
        (b"\xef\xbb\xbf{}", 400, "body: not valid JSON (found a byte order mark, expected none)"),
        (b'{"n": %s}' % (b"9" * 5000), 400, "(found an integer of 5000 digits, expected at most"),
        (b"[]", 400, "body: found a JSON list"),
        (b'{"n": 1, "n": 1}', 400, "the key 'n' occurs twice"),
        (b'{"messages": "\xff"}', 400, "body: byte 14 is not UTF-8"),
        (b"[" * 100_000, 400, "body: not valid JSON"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "messages"),
        (b'{"temperature": NaN, "messages": []}', 400, "found NaN, expected a finite number"),
        (b'{"messages": [], "tools": [{"x": -1e999}]}', 400, "found -1e999, expected a finite"),
        (b" " * 1_000_001, 413, "body: found more than 1000000 bytes"),
    ],
)
def test_a_body_that_is_no_request(demo: Running, body: bytes, status: int, text: str) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{demo.url}{CHAT}", content=body, headers=headers)
    assert response.status_code == status
    assert text in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON ;a=b"])
def test_a_body_of_the_largest_size_may_say_more_of_its_kind(demo: Running, kind: str) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'.ljust(1_000_000)
    response = httpx.post(f"{demo.url}{TEXT}", content=body, headers={"content-type": kind})
    assert response.status_code == 200, response.text


def test_who_is_checked_when_the_end_comes_is_told_of_it(
    demo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: Work) -> None:
        raise Cancelled

    monkeypatch.setattr(demo.service.worker, "submit", ended)
    response = demo.post(TEXT, prompt="a")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutdown")


def test_other_kinds_of_bodies_paths_methods_and_models(demo: Running) -> None:
    text = json.dumps(USER)
    plain = httpx.post(f"{demo.url}{CHAT}", content=text, headers={"content-type": "text/plain"})
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    packed = httpx.post(f"{demo.url}{CHAT}", content=gzip.compress(text.encode()), headers=headers)
    missing = httpx.get(f"{demo.url}/embeddings")
    slash = demo.post(f"{CHAT}/", **USER)
    method = httpx.get(f"{demo.url}{CHAT}")
    model = demo.post(CHAT, **USER, model="gpt-4")
    one = httpx.get(f"{demo.url}/models/gpt-4")
    answers = (plain, packed, missing, slash, method, model, one)
    assert [answer.status_code for answer in answers] == [415, 415, 404, 404, 405, 404, 404]
    assert method.headers["allow"] == "POST"
    assert all(answer.json()["error"]["message"] for answer in answers)
    assert "Content-Encoding: found 'gzip', expected none" in packed.text
    assert model.json()["error"]["code"] == "model_not_found"


def test_the_model_is_described_as_that_of_the_api(demo: Running) -> None:
    made = {"created": demo.service.created, "owned_by": "dsv4"}
    model = {"id": MODEL, "object": "model", **made, "max_model_len": 8192}
    assert httpx.get(f"{demo.url}/models/{MODEL}").json() == model
    assert httpx.get(f"{demo.url}/models").json() == {"object": "list", "data": [model]}


def test_the_client_raises_its_own_errors(demo: Running) -> None:
    import openai

    client = demo.client()
    with pytest.raises(openai.NotFoundError, match="expected 'demo'"):
        client.chat.completions.create(model="other", messages=FRANCE)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="context|expected at most") as caught:
        client.completions.create(model=MODEL, prompt=[1] * 9000)
    assert caught.value.code == "context_length_exceeded"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_fields_that_change_nothing_are_taken(demo: Running) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "n": 1, "presence_penalty": 0.0}
    more = {"logit_bias": {}, "seed": None, "tools": None, "stop": None, "tool_choice": "auto"}
    response = demo.post(CHAT, **USER, **fields, **more, max_tokens=1)
    assert response.status_code == 200, response.text
    options = {"include_usage": None, "include_obfuscation": None}
    response = demo.post(CHAT, **USER, stream=True, stream_options=options, max_tokens=1)
    assert (response.status_code, '"usage"' in response.text) == (200, False)


def test_fields_of_earlier_answers_are_taken(demo: Running) -> None:
    """A client sends back the messages that it was given."""
    more = {"refusal": None, "audio": None, "annotations": [], "function_call": None, "name": "a"}
    answer = {"role": "assistant", "content": "Paris.", "tool_calls": None, **more}
    question = {**FRANCE[0], "tool_calls": None, "tools": []}
    turns = [question, answer, {**SUM[0], "name": "b"}]
    assert demo.post(CHAT, messages=turns, max_tokens=1).status_code == 200


def test_the_widest_values_are_taken(demo: Running) -> None:
    widest = {"top_k": -1, "stop": ["\n" * count for count in range(1, 65)], "seed": 2**63 - 1}
    assert demo.post(CHAT, **USER, **widest, max_tokens=1).status_code == 200
    whole = CompletionFields(prompt=[5] * demo.service.max_context)
    assert len(completion_questions(demo.service, whole)[0]) == 1
    many = CompletionFields(prompt=["a"] * 2048)
    assert len(completion_questions(demo.service, many)[0]) == 2048


def test_ids_that_are_too_many_are_not_read_as_text(
    demo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr("dsv4.serve.asked.text_of", lambda *_: read.append(0) or "")
    assert demo.post(TEXT, prompt=[1] * 9000).status_code == 400
    assert demo.post(TEXT, prompt=[1], max_tokens=1).status_code == 200
    assert len(read) == 1
