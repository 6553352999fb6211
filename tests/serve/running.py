"""A server of the embedded demo model in a thread of the test process."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from dsv4.cli.job import ModelFiles
from dsv4.engine import Engine
from dsv4.serve.command import build_service, load
from dsv4.serve.flags import parse_arguments
from dsv4.serve.server import Server, open_socket, url_of
from dsv4.serve.service import Service
from dsv4.serve.worker import Worker

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "demo"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SUM = [{"role": "user", "content": "What is 29 + 27 - 4?"}]
STORY = [{"role": "user", "content": "Tell me a story."}]
# The demo ends its answers soon; with this it never does.
ENDLESS = {"ignore_eos": True}


@dataclass(frozen=True)
class Running:
    """A server that takes requests; ``url`` ends with /v1."""

    service: Service
    url: str

    @property
    def engine(self) -> Engine:
        return self.service.answering.engine

    def client(self, api_key: str = "none") -> "OpenAI":
        """A client that does not try again."""
        # Imported where it is needed: every process that collects tests comes by here.
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key=api_key, max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """A request as it is."""
        headers = {"content-type": "application/json"}
        content = json.dumps(body)
        return httpx.post(f"{self.url}{path}", content=content, headers=headers, timeout=60)

    def wait_until(self, waiting: int) -> None:
        """Until so many requests have not ended."""
        deadline = time.monotonic() + 30
        while httpx.get(self.url.replace("/v1", "/health")).json()["requests"] != waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def load_demo(*flags: str) -> Service:
    """The service of the demo with flags of the command."""
    arguments = parse_arguments(["--device", "cpu", "--model-name", MODEL, *flags])
    files = ModelFiles.read(arguments.model)
    worker = Worker(arguments.queue)
    engine = worker.call(partial(load, arguments, files.config))
    return build_service(arguments, files, engine, worker)


@contextmanager
def running(service: Service, api_key: str | None = None) -> Iterator[Running]:
    """Serves until the block ends; everything has ended then."""
    bound = open_socket("127.0.0.1", 0, api_key is not None)
    server = Server(service, api_key, "started")
    url = url_of(bound)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield Running(service, url)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def raw_request(url: str, body: bytes, content_type: str = "application/json") -> bytes:
    """The bytes of a POST to a path of the API."""
    _, _, rest = url.partition("//")
    host, _, path = rest.partition("/")
    head = f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connect(url: str) -> socket.socket:
    """A connection to the server."""
    host, _, port = url.partition("//")[2].partition("/")[0].partition(":")
    return socket.create_connection((host, int(port)), timeout=30)
