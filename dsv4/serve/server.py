"""The server: its socket, its start, and its end, which cancels what is under way."""

import asyncio
import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from dsv4.cli.input_file import read_text
from dsv4.command.signals import PATIENCE_SECONDS
from dsv4.command.streams import say
from dsv4.errors import UserError
from dsv4.serve.app import build_app
from dsv4.serve.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Longer than clients and proxies keep a connection: a request that goes out while the server closes
# it is lost.
_IDLE_SECONDS = 120
# So long a client may take to read what its request ends with.
_ENDING_SECONDS = 10


class Server(uvicorn.Server):
    """Serves until a signal comes (``stopped_by``) or the engine has failed."""

    def __init__(self, service: Service, api_key: str | None, started: str) -> None:
        """``started``: a line for stderr, once requests are taken."""
        config = uvicorn.Config(
            build_app(service, api_key),
            http="h11",
            loop="asyncio",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=2 * _ENDING_SECONDS,
        )
        super().__init__(config)
        self.stopped_by: int | None = None
        self._service = service
        self._started = started
        self._stopped_at = 0.0

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Inside the block the signals that end a command end the server, in order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for the end; one that comes much later does not wait for it."""
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by = sig
            self._stopped_at = now
            self.should_exit = True
        elif now - self._stopped_at > PATIENCE_SECONDS:
            os._exit(128 + sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes requests from now on."""
        for bound in sockets or ():
            # Connections that it has ended do not keep the next server from the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        say(self._started)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end: also when the engine has failed."""
        return await super().on_tick(counter) or self._service.fault is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancels what waits and what is under way: their clients are told, and nothing hangs."""
        await self._service.worker.end()
        asyncio.get_running_loop().call_later(_ENDING_SECONDS, self._leave_clients)
        await super().shutdown(sockets)

    def _leave_clients(self) -> None:
        """Gives up connections whose clients do not read: so their requests end."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def open_socket(host: str, port: int, with_key: bool) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises ``UserError``, also for a host beyond
    this machine without an API key.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--host: {host!r}: not found ({reason})") from None
    if not with_key and not ipaddress.ip_address(address[0]).is_loopback:
        raise UserError(f"--host: found {host}, which others reach, expected --api-key-file too")
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UserError(f"--port: {host}:{port}: cannot be used ({error.strerror})") from None
    # Else another server could bind the port while this one loads, and fail once it has loaded too.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients find the API."""
    host, port, *_ = bound.getsockname()
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def read_api_key(path: Path) -> str:
    """The key: the text of the file, without white space around it. Raises ``UserError``."""
    key = read_text("--api-key-file", str(path)).strip()
    if not key or any(character.isspace() for character in key):
        raise UserError(f"--api-key-file: {path}: found {len(key.split())} words, expected one key")
    return key
