"""The signals that end a server, its socket, and its key."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.errors import UserError
from dsv4.serve.server import Server, open_socket, read_api_key, url_of


def make_server() -> Server:
    return Server(None, None, "")  # type: ignore[arg-type]


def test_a_second_signal_ends_the_process_when_it_comes_much_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    times = iter([100.0, 101.0, 103.0])
    monkeypatch.setattr("dsv4.serve.server.os", SimpleNamespace(_exit=ended.append))
    monkeypatch.setattr("dsv4.serve.server.time", SimpleNamespace(monotonic=times.__next__))
    server = make_server()
    for number in (signal.SIGTERM, signal.SIGINT):
        server.handle_exit(number, None)
    assert (server.stopped_by, server.should_exit, ended) == (signal.SIGTERM, True, [])
    server.handle_exit(signal.SIGINT, None)
    assert ended == [128 + signal.SIGINT]


def test_a_signal_that_is_ignored_stays_so_and_all_are_put_back() -> None:
    server = make_server()
    before = signal.getsignal(signal.SIGTERM)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with server.capture_signals():
            assert signal.getsignal(signal.SIGTERM) == server.handle_exit
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGHUP, hangup)


def test_others_may_reach_a_server_that_asks_for_a_key() -> None:
    with pytest.raises(UserError, match="which others reach, expected --api-key-file too"):
        open_socket("0.0.0.0", 0, False)
    open_socket("0.0.0.0", 0, True).close()


def test_a_port_is_taken_while_its_server_loads() -> None:
    with open_socket("127.0.0.1", 0, False) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port: 127\.0\.0\.1:{port}: cannot be used"):
            open_socket("127.0.0.1", port, False)
    open_socket("127.0.0.1", port, False).close()


def test_it_is_not_the_server_that_closes_a_connection_which_is_idle() -> None:
    """A client would send its next request into it. Go keeps one for 90 seconds."""
    assert make_server().config.timeout_keep_alive > 90


def test_a_name_that_cannot_be_one_is_not_found() -> None:
    with pytest.raises(UserError, match="--host: 'a{64}': not found"):
        open_socket("a" * 64, 0, True)


def test_an_address_of_ipv6_is_in_brackets() -> None:
    bound: Any = SimpleNamespace(getsockname=lambda: ("::1", 80, 0, 0))
    assert url_of(bound) == "http://[::1]:80/v1"


def test_a_key_is_one_word(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" se-cret\n")
    assert read_api_key(file) == "se-cret"
    file.write_text("se cret\n")
    with pytest.raises(UserError, match="key: found 2 words, expected one key"):
        read_api_key(file)
