"""What is typed into a chat or piped into it: entries, commands, the line editor, flags."""

import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from dsv4 import UserError
from dsv4.checkpoint.state_file import SavedState
from dsv4.cli.chat.entries import PipedLines, line_reader, read_entry
from dsv4.cli.chat.line_editor import LineEditor
from dsv4.demo import CHECKPOINT
from tests.driver.conftest import Result
from tests.driver.drive import Drive
from tests.source_rules import ROOT

TOOLS = str(ROOT / "docs" / "examples" / "weather.json")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], None]:
    """Puts a text where stdin was."""

    def put(text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)
        monkeypatch.setattr("sys.stdin", stdin)

    return put


def entries(prompts: list[str] | None = None) -> Iterator[str]:
    piped_line = PipedLines()

    def read_line(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        return piped_line(prompt)

    with suppress(EOFError):
        while True:
            yield read_entry(read_line, "tool")


def test_an_entry_is_a_line_or_what_stands_between_fences(pipe: Callable[..., None]) -> None:
    pipe('\ufeffone\r\n\n  \n two \n """\na\n\n/b\n"""\t\n"""\n/c\n"""\n"""\nd')
    prompts: list[str] = []
    assert list(entries(prompts)) == ["one", " two ", "a\n\n/b", "//c", "d"]
    assert prompts[:2] == ["tool> ", "tool> "]
    assert prompts.count("... ") == 8


def test_a_block_without_text_is_no_entry(pipe: Callable[..., None]) -> None:
    pipe('"""\n"""\n"""\n \n\n"""\nnext\n"""\n')
    assert list(entries()) == ["next"]


def test_a_line_that_is_not_utf_8_is_refused(pipe: Callable[..., None]) -> None:
    pipe(b"a\xff\n")
    with pytest.raises(UserError, match="stdin: byte 1 of a line is not UTF-8"):
        list(entries())


@pytest.mark.slow
def test_a_line_that_does_not_end_ends_the_chat(
    talk: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4.cli.chat.entries.MAX_INPUT_BYTES", 3)
    for text in ("abc\nnext", '"""\nabcd\n"""\nnext'):
        expected = "stdin: found a line of more than 3 bytes, expected an end before"
        talk(text).assert_user_error(expected)


def test_a_block_that_does_not_end_is_refused(
    pipe: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4.cli.chat.entries.MAX_INPUT_BYTES", 6)
    pipe('"""\nab\n\nab\n"""\n')
    assert list(entries()) == ["ab\n\nab"]
    for text in ("ab\n" * 99, "\n" * 99):
        pipe(f'"""\n{text}')
        with pytest.raises(UserError, match="stdin: found a block of more than 6 char.*before"):
            list(entries())


def test_a_block_with_such_a_line_is_refused_as_a_whole(pipe: Callable[..., None]) -> None:
    for text, rest in ((b'/reset\nb\xff\n"""\nnext', ["next"]), (b"b", [])):
        pipe(b'"""\na\n\xff\n' + text)
        with pytest.raises(UserError, match="stdin: byte 0 of a line is not UTF-8"):
            read_entry(PipedLines(), "")
        assert list(entries()) == rest


def test_lines_are_edited_and_remembered() -> None:
    with create_pipe_input() as keys:
        editor = LineEditor(keys, DummyOutput())
        keys.send_text("ac\x1b[Db\r")
        assert editor("> ") == "abc"
        keys.send_text("x\x1b\ry\r")
        assert editor("> ") == "x\ny"
        keys.send_text("\x1b[200~p\nq\x1b[201~\r")
        assert editor("> ") == "p\nq"
        keys.send_text("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\r")
        assert editor("> ") == "abc"
        for key, error in (("\x04", EOFError), ("\x03", KeyboardInterrupt)):
            keys.send_text(key)
            with pytest.raises(error):
                editor("> ")


def test_a_terminal_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("dsv4.cli.chat.entries.find_spec", lambda _: None)
    with pytest.raises(UserError, match="--interactive: .* has no prompt_toolkit, expected it"):
        line_reader()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompts", "x", "--out", "y"), "--prompts: found together with --interactive"),
        (("--token-ids", "x"), "--token-ids: found together with --interactive"),
        (("--raw",), "--raw: found together with --interactive, expected a single answer"),
        (("--json", "-"), "--json: found together with"),
        (("--save-state", "x"), "a single answer; /save FILE does it in the chat"),
        (("--plan",), "--plan: found together with"),
        (("--messages", "-"), "--messages: found stdin together with --interactive"),
        (("--tools", "-"), "--tools: found stdin together with --interactive"),
        (("--tools", TOOLS, "--messages", "x"), "--tools: found together with --messages"),
        (("--tools", TOOLS, "--load-state", "x"), "--tools: found together with --load-state"),
        (("--tools", "/nonexistent"), "--tools: /nonexistent: cannot be read"),
        (("--load-state", "/nonexistent"), "/nonexistent: cannot be read"),
        (("--top-p", "0.5", "--temperature", "0"), "--top-p: found with greedy decoding"),
    ],
)
def test_what_a_chat_cannot_have_is_refused(
    drive: Drive, flags: tuple[str, ...], message: str
) -> None:
    drive("--interactive", *flags).assert_user_error(message)


def test_tools_are_a_list_or_a_request(drive: Drive, tmp_path: Path) -> None:
    for text, message in (
        ("{}", "expected a list of tools"),
        ("[", "not valid JSON"),
        ('[{"a": 1, "a": 2}]', "not valid JSON (the key 'a' occurs twice)"),
        ('[{"function": {"name": "a\\"b"}}]', "tools[0].function.name: found 'a\"b', expected"),
        ("[NaN]", "not valid JSON (found NaN, expected a finite number)"),
    ):
        (tmp_path / "tools").write_text(text)
        refused = drive("--tools", tmp_path / "tools", "--prompt", "Hi")
        refused.assert_user_error(f"--tools: {tmp_path}/tools: {message}")
    refused = drive("--tools", TOOLS, "--raw", "--prompt", "Hi")
    refused.assert_user_error("--raw: found together with --tools")
    refused = drive("--tools", TOOLS, "--prompts", "x", "--out", tmp_path / "out")
    refused.assert_user_error("--tools: found together with --prompts")


@pytest.fixture
def talk(drive: Drive, pipe: Callable[..., None]) -> Callable[..., Result]:
    """A greedy chat with the demo that is given ``text``."""

    def run(text: str | bytes, *flags: object) -> Result:
        pipe(text)
        greedy = ("--temperature", 0, "--max-tokens", 16, "--model", CHECKPOINT)
        return drive("--interactive", "--quiet", *greedy, *flags)

    return run


@pytest.mark.slow
def test_a_line_that_fails_leaves_the_chat(talk: Callable[..., Result]) -> None:
    lines = [
        b"/save ~no-such-user/x",
        b"/load a\0b",
        b"/save " + b"x" * 300,
        b"\xff",
        b"What is 3 + 4?",
    ]
    result = talk(b"\n".join(lines))
    assert (result.code, result.out) == (0, "7\n")
    errors = result.err.splitlines()
    expected = [
        "/save: '~no-such-user/x': Could not determine home directory.",
        "/load: 'a\\x00b': found a zero byte, expected the name of a file",
        "File name too long",
        "stdin: byte 0 of a line is not UTF-8",
    ]
    assert len(errors) == len(expected)
    for error, part in zip(errors, expected, strict=True):
        assert part in error


@pytest.mark.slow
def test_commands_and_errors_are_one_line_each(
    talk: Callable[..., Result], drive: Drive, tmp_path: Path
) -> None:
    lines = [
        "/unknown",
        "/save",
        "/reset now",
        "/load\t/nonexistent",
        f"/save {tmp_path}",
        "a word " * 60,
        "/reset",
        "What is 3 + 4?",
        f"/save {tmp_path}/state",
        "/reset",
        f"/load {tmp_path}/state",
        "//",
        "/quit",
        "/help",
    ]
    result = talk("\n".join(lines), "--max-context", 64)
    assert result.code == 0
    assert result.out.splitlines()[0] == "7"
    errors = result.err.splitlines()
    expected = [
        "error: '/unknown': no such command, expected one of /reset, /system, /save, /load",
        "error: /save: found nothing, expected FILE",
        "error: /reset: found 'now', expected nothing",
        "error: /nonexistent: cannot be read",
        f"error: /save: {tmp_path}: found no regular file",
        "error: --max-context: found a prompt of ",
    ]
    assert len(errors) == len(expected)
    for error, beginning in zip(errors, expected, strict=True):
        assert error.startswith(beginning)
    assert errors[-1].endswith("expected at most 64; /reset begins a new conversation")
    saved = SavedState.open(tmp_path / "state").position
    go_on = ("--load-state", tmp_path / "state", "--prompt", "Hi", "--max-tokens", 2)
    result = drive(*go_on, "--model", CHECKPOINT)
    assert f"behind {saved} reused" in result.err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", "found the file of --model, expected another one"),
        ("model.safetensors", "found the file of --model, expected another one"),
        ("new.safetensors", "found a new shard of --model, expected another folder"),
    ],
)
def test_a_chat_is_not_saved_over_files_in_use(
    drive: Drive, pipe: Callable[..., None], broken_copy: Path, name: str, expected: str
) -> None:
    file = broken_copy / name
    before = file.read_bytes() if file.exists() else None
    pipe(f"/save {file}")
    result = drive("--interactive", "--quiet", "--model", broken_copy)
    assert f"error: /save: {file}: {expected}" in result.err
    assert (file.read_bytes() if file.exists() else None) == before


@pytest.mark.slow
def test_a_full_context_is_one_line_and_the_chat_goes_on(talk: Callable[..., Result]) -> None:
    first = talk("What is 3 + 4?", "--prompt", "Tell me a story.", "--max-context", 20)
    assert first.code == 0
    full, too_long = first.err.splitlines()
    assert full == "the context of 20 tokens is full: /reset begins a new one"
    assert too_long.startswith("error: --max-context: found a prompt of")
    both = talk("/reset\nWhat is 3 + 4?", "--prompt", "Tell me a story.", "--max-context", 20)
    assert both.out == first.out + "7\n"


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat() -> None:
    command = [sys.executable, ROOT / "single_shot_inference.py", "--interactive", "--quiet"]
    pipe = subprocess.PIPE
    flags = ("--temperature", "0", "--max-tokens", "200", "--ignore-eos")
    with subprocess.Popen([*command, *flags], stdin=pipe, stdout=pipe, stderr=pipe) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        try:
            chat.stdin.write(b"Tell me a story.\n")
            chat.stdin.flush()
            shown = chat.stdout.read(4)
            chat.send_signal(signal.SIGINT)
            chat.stdin.write(b"/save /nonexistent/state\n")
            chat.stdin.flush()
            assert chat.stderr is not None
            # The answer has ended: the next line was read.
            error = chat.stderr.readline()
            chat.send_signal(signal.SIGINT)
            out, err = chat.communicate(timeout=60)
        finally:
            chat.kill()
    assert error.startswith(b"error: /save: /nonexistent/state: its folder does not exist")
    assert (chat.returncode, err) == (130, b"")
    assert len(shown + out) < 200  # Of some 800 characters.
