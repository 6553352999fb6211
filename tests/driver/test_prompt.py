"""Where the prompt comes from, and prompts that nobody can have meant."""

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.driver.conftest import read_json
from tests.driver.drive import Drive

USER = {"role": "user", "content": "Hi"}


class Stdin(io.TextIOWrapper):
    """Standard input that holds ``raw``."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))


def prompt_of(drive: Drive, folder: Path, *flags: object) -> str:
    path = folder / "report.json"
    assert drive(*flags, "--raw", "--max-tokens", 1, "--json", path).code == 0
    return read_json(path)["prompt"]["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"a", "a"),
        (b"a\n", "a"),
        (b"a\r\n", "a"),
        (b"a\n\n", "a\n"),
        (b"a\n ", "a\n "),
        (b"a\r", "a\r"),
        (b"\na", "\na"),
    ],
)
def test_one_line_break_at_the_end_of_a_file_or_pipe_is_not_part_of_the_prompt(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, expected: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(raw)
    assert prompt_of(drive, tmp_path, "--prompt-file", file) == expected
    monkeypatch.setattr(sys, "stdin", Stdin(raw))
    assert prompt_of(drive, tmp_path, "--prompt-file", "-") == expected


def test_a_line_break_on_the_command_line_is_meant(drive: Drive, tmp_path: Path) -> None:
    assert prompt_of(drive, tmp_path, "--prompt", "a\n") == "a\n"


@pytest.mark.parametrize("raw", [b"", b"\n", b"\r\n"])
def test_an_empty_prompt_is_refused(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(raw)
    drive("--prompt-file", file).assert_user_error(f"--prompt-file: {file}: found no text")
    monkeypatch.setattr(sys, "stdin", Stdin(raw))
    drive("--prompt-file", "-", "--raw").assert_user_error("--prompt-file: -: found no text")
    drive("--prompt", "").assert_user_error("--prompt: found no text, expected a prompt")


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], "found no messages"),
        ([{"role": "system", "content": "x"}], "found a message of system at the end"),
        ([USER, {"role": "assistant", "content": "x"}], "found a message of assistant at the end"),
        ([USER, {"role": "latest_reminder", "content": "x"}], "found a message of latest_reminder"),
    ],
)
def test_a_conversation_that_asks_for_no_answer_is_refused(
    drive: Drive, tmp_path: Path, messages: list, found: str
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages))
    result = drive("--messages", file)
    result.assert_user_error(f"--messages: {file}: {found}")
    assert ('"wo_eos": true' in result.err) == ("assistant" in found)


@pytest.mark.parametrize("thinking", ["off", "on"])
def test_an_open_message_of_the_assistant_is_gone_on_with(
    drive: Drive, tmp_path: Path, thinking: str
) -> None:
    file = tmp_path / "messages.json"
    last = {"role": "assistant", "content": "I think", "wo_eos": True}
    file.write_text(json.dumps([USER, last]))
    path = tmp_path / "report.json"
    flags = ("--max-tokens", 3, "--seed", 1, "--ignore-eos", "--json", path)
    result = drive("--messages", file, "--thinking", thinking, *flags)
    report = read_json(path)
    assert report["prompt"]["text"].endswith("</think>I think")
    assert "<think>" not in result.out  # Reasoning was over before the message began.
    assert report["completion"]["message"]["content"] == report["completion"]["text"]


@pytest.mark.parametrize("thinking", ["off", "on"])
@pytest.mark.parametrize("task", ["title", "domain", "action"])
def test_a_quick_instruction_asks_for_an_answer_without_reasoning(
    drive: Drive, tmp_path: Path, task: str, thinking: str
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{**USER, "task": task}]))
    path = tmp_path / "report.json"
    flags = ("--max-tokens", 3, "--seed", 1, "--ignore-eos", "--json", path)
    assert drive("--messages", file, "--thinking", thinking, *flags).code == 0
    completion = read_json(path)["completion"]
    assert completion["message"]["content"] == completion["text"] != ""


@pytest.mark.parametrize("last", [{**USER, "task": "title"}, {**USER, "role": "tool"}])
def test_a_task_that_joins_a_turn_asks_for_no_plain_answer(
    drive: Drive, tmp_path: Path, last: dict
) -> None:
    """The encoder leaves it out, so the prompt ends with open reasoning."""
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([USER, last]))
    path = tmp_path / "report.json"
    flags = ("--max-tokens", 3, "--seed", 1, "--ignore-eos", "--json", path)
    assert drive("--messages", file, "--thinking", "on", *flags).code == 0
    report = read_json(path)
    assert report["prompt"]["text"].endswith("<think>")
    assert report["completion"]["message"]["content"] == ""


def test_messages_come_from_pipes_too(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = json.dumps([USER]).encode()
    monkeypatch.setattr(sys, "stdin", Stdin(raw))
    assert drive("--messages", "-", "--max-tokens", 1).code == 0
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(raw,))
    writer.start()
    assert drive("--messages", pipe, "--max-tokens", 1).code == 0
    writer.join()


@pytest.mark.parametrize("flag", ["--prompt-file", "--messages", "--token-ids", "--prompts"])
def test_what_does_not_end_is_refused(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("dsv4.cli.input_file.MAX_INPUT_BYTES", 2**22)
    out = ("--out", "out") if flag == "--prompts" else ()
    for file in ("/dev/zero", "/dev/full", "-"):
        with Path("/dev/zero").open() as zeros:
            monkeypatch.setattr(sys, "stdin", zeros)
            refused = drive(flag, file, *out)
        refused.assert_user_error(f"{flag}: {file}: found more than 4194304 bytes, expected an end")


@pytest.mark.parametrize(
    ("request_text", "place"),
    [
        ('[{"role": "user", "content": "ab\\ud800"}]', "messages[0].content: found a lone"),
        ('[{"role": "user", "content": "x", "\\udfff": 1}]', "a key of messages[0]: found a lone"),
        ('{"messages": [], "tools": [3]}', ": tools[0] has no object"),
        ('{"messages": [], "tool": []}', "found a field 'tool', expected only messages, tools, "),
        ('["hi"]', "messages[0] is str, expected an object with a role"),
        ('[{"role": "user", "content": 5}]', "messages[0].content is int"),
        ('[{"role": "user", "content": ["a"]}]', "messages[0].content[0] is not an object"),
        ('[{"role": "user", "content_blocks": 5}]', "messages[0].content_blocks is int"),
        ('[{"role": "user", "content_blocks": [5]}]', "content_blocks[0] is not an object"),
        ('[{"role": "system", "tools": {"a": 1}}]', "messages[0].tools is dict"),
        ('[{"role": "system", "tools": [5]}]', 'messages[0].tools[0] has no object "function"'),
        ('[{"role": "assistant", "tool_calls": 5}]', "messages[0].tool_calls is int"),
        ('[{"role": "assistant", "tool_calls": ["f"]}]', "tool_calls[0] has no object "),
        (
            '[{"role": "assistant", "tool_calls": [{"function": {"name": ["\\""], '
            '"arguments": "{"}}]}]',
            "messages[0].tool_calls[0].function.name is ",
        ),
        (
            '[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]',
            "messages[0].content[1]: found 'image_url', expected a part of type text",
        ),
        (
            '[{"role": "user", "content": [{"type": "text", "txet": "a"}]}]',
            "messages[0].content[0]: found no text, expected a string",
        ),
        (
            '[{"role": "user", "content": "a", "tools": [{"function": {"name": "f"}}]}]',
            "messages[0].tools: found in a message of 'user', expected system or developer",
        ),
        (
            '[{"role": "tool", "content": "a", "content_blocks": [{"type": "text"}]}]',
            "messages[0].content_blocks: found in a message of 'tool', expected user",
        ),
        (
            '[{"role": "user", "content_blocks": [{"type": "tool_result", "content": '
            '[{"type": "text", "text": "a"}, {"type": "image_url"}]}]}]',
            "messages[0].content_blocks[0].content[1]: found 'image_url', expected",
        ),
        (
            '[{"role": "user", "content": "a", "content_blocks": []}]',
            "messages[0].content: found with content_blocks, expected one of them",
        ),
        (
            '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '
            '{"a": 1, "b\\"c": 2}}}]}]',
            "messages[0].tool_calls[0].function.arguments: found 'b\"c', expected",
        ),
        (
            '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '
            '"{\\"b\\\\\\"c\\": 2}"}}]}]',
            "messages[0].tool_calls[0].function.arguments: found 'b\"c', expected",
        ),
    ],
)
def test_errors_name_the_place_in_the_messages_file(
    drive: Drive, tmp_path: Path, request_text: str, place: str
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(request_text)
    drive("--messages", file).assert_user_error(f"--messages: {file}: ", place)


@pytest.mark.parametrize("flag", ["--prompt", "--system"])
def test_lone_surrogates_are_counted_in_the_flag(drive: Drive, flag: str) -> None:
    drive(flag, "ab\udcff").assert_user_error(f"{flag}: found a lone surrogate at character 2")


@pytest.mark.parametrize("name", ["tokenizer.json", "prompt.txt", "messages.json"])
def test_a_file_that_may_not_be_read_is_named(
    drive: Drive, broken_copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Path, *arguments: Any, **named: Any) -> Any:
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return method(path, *arguments, **named)

        return read

    monkeypatch.setattr(Path, "read_bytes", guarded(Path.read_bytes))
    monkeypatch.setattr(Path, "open", guarded(Path.open))
    flags = {"prompt.txt": ["--prompt-file"], "messages.json": ["--messages"]}.get(name, [])
    file = broken_copy / name
    result = drive("--model", broken_copy, *(part for flag in flags for part in (flag, file)))
    result.assert_user_error(str(file), "Permission denied")
    assert result.err.count(str(file)) == 1
