"""Whose requests come through to the application, and how many at once."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from dsv4.serve.guard import MOST_REQUESTS, Guard


def scope_of(path: str, headers: dict[str, str] | None = None, raw_path: str | None = None) -> Any:
    given = {"host": "localhost:8000", **(headers or {})}
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": (raw_path or path).encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
    }


class App:
    """Notes the requests that come through."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def ask(guard: Guard, scope: Scope) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await guard(scope, receive, send)
    return sent


def status(path: str, host: str) -> int:
    scope = scope_of(path, {"host": host}, path)
    start, *_ = asyncio.run(ask(Guard(App(), None), scope))
    return start["status"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "a@localhost"]
)
def test_without_a_key_this_machine_may_ask(host: str) -> None:
    assert status("/v1/models", host) == 200


@pytest.mark.parametrize(
    "host", ["example.org", "localhost.example.org", "", "[::1", "localhost@example.org", "0.0.0.0"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_without_a_key_no_other_name_may_ask(host: str, path: str) -> None:
    assert status(path, host) == 403


def test_the_host_of_a_whole_url_counts_and_its_path_is_asked_for() -> None:
    for url in ("http://example.org/v1/models", "HTTPS://example.org"):
        assert status(url, "localhost") == 403
    app = App()
    url = "http://localhost:8000/v1/mod%20els"
    asyncio.run(ask(Guard(app, None), scope_of(url, {"host": "example.org"}, url)))
    [scope] = app.scopes
    assert (scope["path"], scope["raw_path"]) == ("/v1/mod els", b"/v1/mod%20els")
    assert scope["headers"] == [(b"host", b"localhost:8000")]


def test_no_more_ask_at_once_than_there_is_place_for() -> None:
    async def run() -> None:
        leave = asyncio.Event()

        async def waiting(scope: Scope, _: Receive, send: Send) -> None:
            if scope["path"] == "/wait":
                await leave.wait()
                raise ConnectionError
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard = Guard(waiting, None)

        async def status_of(path: str) -> int:
            start, *_ = await ask(guard, scope_of(path))
            return start["status"]

        waits = [asyncio.create_task(status_of("/wait")) for _ in range(MOST_REQUESTS)]
        await asyncio.sleep(0)
        assert (await status_of("/v1/models"), await status_of("/health")) == (503, 200)
        leave.set()
        await asyncio.gather(*waits, return_exceptions=True)
        # Those that have failed have left their places too.
        assert await status_of("/v1/models") == 200

    asyncio.run(run())
