"""Many requests at once: good ones, malformed ones, and clients that leave at any moment.

``python -m tests.serve.storm URL REQUESTS`` sends them to a server that runs elsewhere.
"""

import json
import random
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from tests.serve.running import connect, raw_request

CLIENTS = 8
TEXTS = ("What is 3 + 4?", "Tell me a story.", "word " * 300, "Привет 🜨", "<think>")


def good_body(draw: random.Random) -> tuple[str, bytes]:
    """A path and a request for it."""
    fields = {"stream": draw.random() < 0.5, "max_tokens": draw.randint(1, 12)}
    if draw.random() < 0.3:
        fields["ignore_eos"] = True
    text = draw.choice(TEXTS)
    if draw.random() < 0.5:
        return "chat/completions", json.dumps(
            {"messages": [{"role": "user", "content": text}], **fields}
        ).encode()
    scored = {"echo": True, "logprobs": 2} if draw.random() < 0.3 else {}
    return "completions", json.dumps({"prompt": text, **fields, **scored}).encode()


def malformed(draw: random.Random, body: bytes) -> bytes:
    """Another body made of it: cut, with other bytes, or with fields that are wrong."""
    kind = draw.randrange(4)
    if kind == 0:
        return body[: draw.randrange(len(body))]
    if kind == 1:
        place = draw.randrange(len(body))
        return body[:place] + draw.randbytes(3) + body[place:]
    if kind == 2:
        return body[:-1] + b', "max_tokens": -5}'
    return b"[" * draw.randrange(5000)


def one_request(url: str, seed: int) -> str:
    """What became of it: ``left``, or the status of the response, which came to its end."""
    draw = random.Random(seed)
    path, body = good_body(draw)
    good = draw.random() < 0.6
    if not good:
        body = malformed(draw, body)
    request = raw_request(f"{url}/{path}", body)
    leaves = draw.random() < 0.4
    with connect(url) as connection:
        connection.settimeout(120)
        if leaves and draw.random() < 0.3:
            connection.sendall(request[: draw.randrange(len(request))])
            return "left"
        connection.sendall(request)
        if leaves:
            connection.settimeout(draw.choice((0.001, 0.05, 0.3)))
            with suppress(TimeoutError):
                connection.recv(draw.choice((1, 400)))
            return "left"
        status = read_response(connection)
    if good and status not in (200, 503):
        raise AssertionError(f"{status}: {body[:200]!r}")
    return str(status)


def read_response(connection: socket.socket) -> int:
    """The status of a response, read to its end."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = dict(
            line.decode().lower().strip().split(": ", 1) for line in iter(file.readline, b"\r\n")
        )
        if "content-length" in headers:
            file.read(int(headers["content-length"]))
            return status
        assert headers["transfer-encoding"] == "chunked"
        while size := int(file.readline(), 16):
            file.read(size + 2)
        return status


def storm(url: str, requests: int) -> Counter[str]:
    """Sends them from several clients at once, and counts what became of them."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return Counter(clients.map(partial(one_request, url), range(requests)))


if __name__ == "__main__":
    sys.stdout.write(f"{storm(sys.argv[1], int(sys.argv[2]))}\n")
