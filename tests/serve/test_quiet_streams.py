"""Streams that have nothing to say though tokens come, and streams that nobody reads."""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dsv4.serve.answering import Ended, PromptRead, Question, Said, TokenSaid
from dsv4.serve.service import Tally
from dsv4.serve.worker import Check, Worker
from tests.serve.running import FRANCE, Running, connect, raw_request, running

pytestmark = pytest.mark.slow


class Thoughtful:
    """In the place of the engine: its tokens come steadily and show nothing, as those of a tool
    call's value do until it ends.
    """

    def answer(self, question: Question, check: Check) -> Iterator[Said]:
        yield PromptRead(0)
        for _ in range(40):
            time.sleep(0.01)
            yield TokenSaid(5, "", None)
        yield Ended("", "length")


def test_a_stream_whose_tokens_show_nothing_says_that_it_waits(
    demo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4.serve.reply.IDLE_SECONDS", 0.1)
    quiet = replace(
        demo.service,
        worker=Worker(2),
        answering=Thoughtful(),  # type: ignore[arg-type]
    )
    with running(quiet) as one:
        text = one.post("/chat/completions", messages=FRANCE, stream=True).text
    assert 1 <= text.count(": waiting\n\n") <= 5
    assert text.endswith("data: [DONE]\n\n")


class Talkative:
    """In the place of the engine: more than any connection holds, and then nothing."""

    def __init__(self) -> None:
        self.all_said = threading.Event()

    def answer(self, question: Question, check: Check) -> Iterator[Said]:
        yield PromptRead(0)
        for _ in range(200):
            yield TokenSaid(5, "a" * 100_000, None)
        self.all_said.set()
        while True:
            check()
            time.sleep(0.01)


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(
    demo: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dsv4.serve.server._ENDING_SECONDS", 1)
    engine = Talkative()
    service = replace(
        demo.service,
        worker=Worker(2),
        answering=engine,  # type: ignore[arg-type]
        tally=Tally(),
    )
    body = b'{"prompt": "a", "stream": true}'
    with running(service) as one:
        stalled = connect(one.url)
        stalled.sendall(raw_request(f"{one.url}/completions", body))
        assert engine.all_said.wait(30)
    with stalled:
        assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
        assert service.tally.failed == 1
