"""The commands of a chat: what each is asked of, and which flags a chat cannot have."""

from pathlib import Path
from typing import Any

import pytest

from dsv4.cli.arguments import parse_arguments
from dsv4.cli.chat.commands import HELP, is_command, message_of, run_command
from dsv4.errors import UserError


class Notes:
    """In the place of a chat: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def reset(self) -> None:
        self.asked.append(("reset",))

    def set_system(self, text: str) -> None:
        self.asked.append(("system", text))

    def save(self, path: Path) -> None:
        self.asked.append(("save", path))

    def load(self, path: Path) -> None:
        self.asked.append(("load", path))


def run(entry: str) -> tuple[bool, list[tuple[object, ...]]]:
    chat: Any = Notes()
    return run_command(chat, entry), chat.asked


def test_a_command_does_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    for entry, asked in (
        ("/reset ", ("reset",)),
        ("/system  Be brief,\n please. ", ("system", "Be brief,\n please.")),
        ("/save a file", ("save", Path("a file"))),
        ("/load\t~/state", ("load", Path("/home/reader/state"))),
    ):
        assert run(entry) == (True, [asked])


def test_only_quit_ends_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("/help") == (True, [])
    assert capsys.readouterr() == ("", f"{HELP}\n")
    assert run("/quit") == (False, [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("/quit now", "^/quit: found 'now', expected nothing$"),
        ("/help x", "^/help: found 'x', expected nothing$"),
        ("/system", "^/system: found nothing, expected TEXT$"),
        ("/load ", "^/load: found nothing, expected FILE$"),
        ("/resets", "^'/resets': no such command, expected one of /reset, "),
    ],
)
def test_a_command_that_is_not_one_does_nothing(entry: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(entry)


def test_two_slashes_begin_a_message() -> None:
    assert [is_command(entry) for entry in ("/a", "//a", "a", "a/")] == [True, False, False, False]
    assert [message_of(entry) for entry in ("//a", "a", "///")] == ["/a", "a", "//"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--trace", "x"), "--trace"),
        (("--trace", "x", "--trace-at", "1"), "--trace"),
        (("--trace-at", "1"), "--trace-at"),
        (("--profile",), "--profile"),
        (("--logprobs", "1"), "--logprobs"),
        (("--prompt-file", "-"), "--prompt-file"),
    ],
)
def test_a_chat_has_no_flags_of_one_answer(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named}: found .*together with --interactive"):
        parse_arguments(["--model", "x", "--interactive", *flags])
