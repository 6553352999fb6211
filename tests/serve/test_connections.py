"""Clients that leave, wait, are too many or may not ask; and a server that ends."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from dsv4.serve.answering import PromptRead, Question, Said
from dsv4.serve.guard import MOST_REQUESTS
from dsv4.serve.server import open_socket
from dsv4.serve.service import Service
from dsv4.serve.worker import Check, Worker
from tests.serve.running import (
    ENDLESS,
    FRANCE,
    MODEL,
    Running,
    connect,
    raw_request,
    running,
)

pytestmark = pytest.mark.slow

FOREVER: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "extra_body": ENDLESS}


def start_stream(demo: Running) -> Any:
    """An answer that does not end, begun."""
    stream = demo.client().chat.completions.create(**FOREVER, stream=True)
    iterator = iter(stream)
    for _ in range(3):
        next(iterator)
    return stream


def test_who_leaves_a_stream_ends_its_generation(demo: Running) -> None:
    stream = start_stream(demo)
    demo.wait_until(1)
    stream.close()
    demo.wait_until(0)
    assert demo.engine.position < 1000


def test_who_leaves_while_waiting_for_one_object_ends_its_generation(demo: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "ignore_eos": true}'
    with connect(demo.url) as connection:
        connection.sendall(raw_request(f"{demo.url}/chat/completions", body))
        demo.wait_until(1)
    demo.wait_until(0)


def test_a_fault_behind_the_engine_ends_its_generation(
    demo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("dsv4.serve.completion.CompletionAnswer.feed", feed)
    response = demo.post("/completions", prompt="a", max_tokens=10**6, **ENDLESS)
    assert (response.status_code, "a fault" in response.json()["error"]["message"]) == (500, True)
    demo.wait_until(0)
    assert demo.engine.position < 1000


def test_who_leaves_the_queue_is_not_answered_and_the_queue_has_its_place_again(
    demo: Running,
) -> None:
    import openai

    stream = start_stream(demo)
    before = demo.service.tally.answered
    body = b'{"messages": [{"role": "user", "content": "a"}], "stream": true}'
    waiting = [connect(demo.url) for _ in range(2)]
    for connection in waiting:
        connection.sendall(raw_request(f"{demo.url}/chat/completions", body))
    demo.wait_until(3)
    with pytest.raises(openai.InternalServerError, match="the queue is full: 3") as caught:
        demo.client().chat.completions.create(model=MODEL, messages=FRANCE)  # type: ignore[arg-type]
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
    with pytest.raises(openai.BadRequestError):  # What is wrong does not wait to be told.
        demo.client().completions.create(model=MODEL, prompt="")
    for connection in waiting:
        connection.close()
    demo.wait_until(1)
    stream.close()
    demo.wait_until(0)
    assert demo.service.tally.answered == before
    assert demo.post("/completions", prompt="a", max_tokens=1).status_code == 200


def test_answers_come_in_the_order_of_arrival(demo: Running) -> None:
    done: list[int] = []

    def ask(number: int) -> None:
        demo.post("/completions", prompt="a", max_tokens=2)
        done.append(number)

    stream = start_stream(demo)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        demo.wait_until(2 + number)
    stream.close()
    for thread in threads:
        thread.join()
    assert done == [0, 1]


def test_a_stream_that_waits_says_so(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.serve.reply.IDLE_SECONDS", 0.01)
    stream = start_stream(demo)
    with connect(demo.url) as waiting, waiting.makefile("rb") as file:
        waiting.sendall(raw_request(f"{demo.url}/completions", b'{"prompt": "a", "stream": true}'))
        assert any(line == b": waiting\n" for line in file)
    stream.close()
    demo.wait_until(0)


def test_half_a_request_keeps_nobody_waiting(demo: Running) -> None:
    whole = raw_request(f"{demo.url}/completions", b'{"prompt": "a"}')
    with connect(demo.url) as slow, connect(demo.url) as gone:
        slow.sendall(whole[:-4])
        gone.sendall(whole[:20])
        gone.close()
        assert demo.post("/completions", prompt="a", max_tokens=1).status_code == 200
        slow.sendall(whole[-4:])
        assert slow.recv(64).startswith(b"HTTP/1.1 200")


def test_more_requests_than_the_server_holds_get_the_error_object(demo: Running) -> None:
    half = raw_request(f"{demo.url}/completions", b'{"prompt": "a"}')[:-4]

    def answer_until(status: int) -> httpx.Response:
        deadline = time.monotonic() + 30
        while (response := httpx.get(f"{demo.url}/models", timeout=30)).status_code != status:
            assert time.monotonic() < deadline
        return response

    with ExitStack() as connections:
        for _ in range(MOST_REQUESTS):
            connections.enter_context(connect(demo.url)).sendall(half)
        error = answer_until(503).json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "server_error")
        assert error["message"] == f"the server is full: {MOST_REQUESTS} requests"
        assert httpx.get(demo.url.replace("/v1", "/health"), timeout=30).status_code == 200
    assert answer_until(200).json()["object"] == "list"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("example.org", 403), ("[", 403)],
)
def test_without_a_key_only_names_of_this_machine_are_answered(
    demo: Running, host: str, status: int
) -> None:
    response = httpx.get(f"{demo.url}/models", headers={"host": host})
    assert response.status_code == status
    assert "www-authenticate" not in response.headers  # No key would help.


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://127.0.0.1/v1/models?a=b", 200),
        ("HTTP://localhost:80/v1/m%6Fdels", 200),
        ("http://127.0.0.1", 404),
        ("http://example.org/v1/models", 403),
        ("http://[/v1/models", 403),
        ("ftp://127.0.0.1/v1/models", 404),
    ],
)
def test_a_target_may_be_a_whole_url_whose_host_counts(
    demo: Running, target: str, status: int
) -> None:
    with connect(demo.url) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(64).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.fixture
def service(demo: Running) -> Service:
    """With the same engine and a thread of its own: that of the test before has ended."""
    return replace(demo.service, worker=Worker(2))


def test_with_a_key_who_has_it_is_answered(service: Service) -> None:
    import openai

    with running(service, api_key="se-cret") as one:
        assert [model.id for model in one.client("se-cret").models.list()] == [MODEL]
        for key in ("other", "se-cre", "ключ"):
            headers = {b"authorization": f"Bearer {key}".encode()}
            response = httpx.get(f"{one.url}/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            assert response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            one.client("x").chat.completions.create(model=MODEL, messages=FRANCE)  # type: ignore[arg-type]
        health = httpx.get(one.url.replace("/v1", "/health"), headers={"host": "example.org"})
        assert health.json() == {"status": "ok", "requests": 0}


def test_a_key_may_have_any_letters(service: Service) -> None:
    with running(service, api_key="ключ") as one:
        for words in ("Bearer ключ", "bearer  ключ"):
            headers = {b"authorization": words.encode()}
            assert httpx.get(f"{one.url}/models", headers=headers).status_code == 200


class Failing:
    """In the place of the engine: every question ends with ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def answer(self, question: Question, check: Check) -> Iterator[Said]:
        yield PromptRead(0)
        raise self.error


def test_nan_is_told_and_the_server_goes_on(demo: Running) -> None:
    import openai

    failing = replace(
        demo.service,
        worker=Worker(2),
        answering=Failing(FloatingPointError("NaN after 3 tokens")),  # type: ignore[arg-type]
    )
    with running(failing) as one:
        for _ in range(2):
            response = one.post("/completions", prompt="a")
            assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
            assert response.json()["error"]["message"] == "NaN after 3 tokens"
        with pytest.raises(openai.APIError, match="NaN after 3 tokens"):
            list(one.client().completions.create(model=MODEL, prompt="a", stream=True))


def test_a_fault_of_the_engine_is_told_and_ends_the_server(demo: Running) -> None:
    fault = RuntimeError("CUDA error: an illegal instruction")
    failing = replace(demo.service, worker=Worker(2), answering=Failing(fault))  # type: ignore[arg-type]
    with running(failing) as one:
        error = one.post("/completions", prompt="a").json()["error"]
        assert (error["message"], error["code"]) == (
            "the engine has failed, the server is ending",
            "shutdown",
        )
        with pytest.raises(httpx.TransportError):
            one.wait_until(-1)
    assert failing.fault is fault


def test_the_next_server_has_the_port_though_connections_of_the_last_one_have_just_ended(
    service: Service,
) -> None:
    with httpx.Client() as client, running(service) as one:
        assert client.get(one.url.replace("/v1", "/health")).status_code == 200
        port = int(one.url.rpartition(":")[2].removesuffix("/v1"))
    # The system remembers the connection for a minute: its server was the first to close it.
    open_socket("127.0.0.1", port, False).close()


def test_the_end_of_a_server_ends_what_is_under_way_and_what_waits(service: Service) -> None:
    import openai

    found: dict[str, Any] = {}

    def wait(url: str) -> None:
        found["waited"] = httpx.post(f"{url}/completions", json={"prompt": "a"}, timeout=60)

    with running(service) as one:
        half = connect(one.url)
        half.sendall(raw_request(f"{one.url}/completions", b'{"prompt": "a"}')[:-4])
        stream = iter(start_stream(one))
        thread = threading.Thread(target=wait, args=(one.url,))
        thread.start()
        one.wait_until(2)
        began = time.monotonic()
    with pytest.raises(openai.APIError, match="the server is ending"):
        list(stream)
    thread.join()
    assert (found["waited"].status_code, found["waited"].json()["error"]["code"]) == (
        503,
        "shutdown",
    )
    with half, half.makefile("rb") as file:
        response = file.read()
    assert response.startswith(b"HTTP/1.1 503")
    assert b'"code": "shutdown"' in response
    assert time.monotonic() - began < 20
