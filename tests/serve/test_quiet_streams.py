"""Streams that have nothing to say though tokens come."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dsv4.serve.answering import Ended, PromptRead, Question, Said, TokenSaid
from dsv4.serve.worker import Check, Worker
from tests.serve.running import FRANCE, Running, running

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
