"""A response whose content a job makes; who leaves before its end cancels the job."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4.command.errors import user_message
from dsv4.serve.answering import Said
from dsv4.serve.errors import ApiError, server_ending, server_fault
from dsv4.serve.service import Service
from dsv4.serve.usage import Usage
from dsv4.serve.worker import HARMLESS, Cancelled, Job

# A stream that has nothing to say yet says so, or a proxy takes it for dead.
IDLE_SECONDS = 15.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
# JSON may have them in a text, but clients that split a stream into lines as Python splits a text
# (httpx does) would cut an event there.
_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_LOG = logging.getLogger(__name__)


class Answer(Protocol):
    """How what the engine says becomes a response."""

    usage: Usage

    def feed(self, index: int, said: Said) -> list[dict[str, Any]]:
        """The chunks of a stream that come of it."""
        ...

    def response(self) -> dict[str, Any]:
        """The whole, at the end."""
        ...

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that is to tell its usage."""
        ...


def json_response(
    content: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON object."""
    return Response(_json(content), status, headers, media_type="application/json")


class Reply:
    """The response to a request that waits for the engine, as an ASGI application."""

    def __init__(self, service: Service, job: Job, answer: Answer) -> None:
        self._service = service
        self._job = job
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One object, when it is complete."""
        async with self._left_to(receive):
            async for _ in self._chunks():
                pass
            error = self._error()
            if error is None:
                response = json_response(self._answer.response())
            else:
                response = json_response(error.body(), error.status)
            await response(scope, receive, send)

    async def _chunks(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The chunks of every result that makes some, none when nothing was to be said for a while:
        there was no result, or tokens that make nothing certain, as those of a call's long value.
        """
        loop = asyncio.get_running_loop()
        said = loop.time()
        async for result in self._job.results(IDLE_SECONDS):
            if result is None:
                chunks: list[dict[str, Any]] = []
            else:
                index, found = result  # type: ignore[misc]
                chunks = self._answer.feed(index, found)
            if chunks or result is None or loop.time() - said >= IDLE_SECONDS:
                said = loop.time()
                yield chunks

    def _error(self) -> ApiError | None:
        """What to say in place of the answer, once the job has ended; a fault ends the server."""
        error = self._job.error
        tally = self._service.tally
        usage = self._answer.usage
        if error is None:
            tally.answered += 1
            tally.prompt_tokens += usage.prompt_tokens
            tally.reused_tokens += usage.reused_tokens
            tally.tokens += usage.tokens
            _LOG.info("answered: %s", usage.record())
            return None
        tally.failed += 1
        _LOG.info("not answered: %r", error)
        if isinstance(error, Cancelled):
            return server_ending()
        if isinstance(error, HARMLESS):
            return ApiError(500, user_message(error))
        self._service.fault = error
        return ApiError(500, "the engine has failed, the server is ending", code="shutdown")

    @asynccontextmanager
    async def _left_to(self, receive: Receive) -> AsyncIterator[None]:
        """Whoever leaves the block, and a client that leaves the connection, cancels the job."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._job.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            self._job.cancel()


class StreamedReply(Reply):
    """The same as server-sent events, chunk by chunk; ``with_usage``: and its usage at the end."""

    def __init__(self, service: Service, job: Job, answer: Answer, with_usage: bool) -> None:
        super().__init__(service, job, answer)
        self._with_usage = with_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Chunks as they come. An error is an event of its own, and the last one."""
        async with self._left_to(receive):
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await send(start)
            async with _FaultAsEvent(send):
                async for chunks in self._chunks():
                    events = b"".join(_event(_json(chunk)) for chunk in chunks)
                    await _send_body(send, events or b": waiting\n\n")
                await _send_body(send, self._ending(), more=False)

    def _ending(self) -> bytes:
        error = self._error()
        if error is not None:
            return _event(_json(error.body()))
        usage = _event(_json(self._answer.usage_chunk())) if self._with_usage else b""
        return usage + _event(b"[DONE]")


class _FaultAsEvent:
    """A fault of the program inside the block ends the stream as its last event, and goes on to the
    log: behind the start of a response no handler of the application can tell the client.
    """

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __aenter__(self) -> None:
        """Nothing happens."""

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            await _send_body(self._send, _event(_json(server_fault(error).body())), more=False)


def _json(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    return text.encode("utf-8", "backslashreplace")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
