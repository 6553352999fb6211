"""Replies as JSON that every client can read, and what they say of an error."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsv4.errors import UserError
from dsv4.serve.answering import Question, Said, TokenSaid
from dsv4.serve.chat import ChatAnswer
from dsv4.serve.reply import json_response
from dsv4.serve.worker import Check, Worker
from tests.serve.running import FRANCE, Running, running


def test_no_reply_has_numbers_that_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_response({"logprob": math.nan})


def test_a_reply_is_unicode_whatever_the_folder_of_the_model_is_called() -> None:
    assert json.loads(bytes(json_response({"model": "a\udcff"}).body)) == {"model": "a\udcff"}


def test_a_reply_is_one_line_also_where_lines_are_split_as_python_does() -> None:
    """As clients do that read a stream with httpx."""
    content = {"text": "a\x85b\u2028c\u2029d\x0be\x1cf\r\n"}
    line = bytes(json_response(content).body).decode()
    assert line.splitlines() == [line]
    assert json.loads(line) == content


class Refusing:
    """In the place of the engine: it takes no question."""

    def answer(self, question: Question, check: Check) -> Iterator[Said]:
        raise UserError("EngineConfig.max_context:\nfound 3")


@pytest.mark.slow
def test_what_the_engine_refuses_is_told_and_the_server_goes_on(demo: Running) -> None:
    answering: Any = Refusing()
    refusing = replace(demo.service, worker=Worker(2), answering=answering)
    with running(refusing) as one:
        for _ in range(2):
            response = one.post("/completions", prompt="a")
            message = response.json()["error"]["message"]
            assert (response.status_code, message) == (500, "--max-context: found 3")
    assert refusing.fault is None


@pytest.mark.slow
def test_a_fault_behind_the_engine_is_the_last_event_of_a_stream_and_the_server_goes_on(
    demo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = ChatAnswer.feed

    def fail(answer: ChatAnswer, index: int, said: Said) -> list[dict[str, Any]]:
        if isinstance(said, TokenSaid):
            raise RuntimeError("a fault\nof two lines")
        return feed(answer, index, said)

    with monkeypatch.context() as patched:
        patched.setattr(ChatAnswer, "feed", fail)
        response = demo.post("/chat/completions", messages=FRANCE, stream=True)
    first, error = [json.loads(event[6:]) for event in response.text.strip().split("\n\n")]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    message = r"a fault of the server: RuntimeError('a fault\nof two lines')"
    expected = {"message": message, "type": "server_error", "param": None, "code": None}
    assert error == {"error": expected}
    demo.wait_until(0)
    assert demo.service.fault is None
    assert demo.post("/completions", prompt="a", max_tokens=1).status_code == 200
