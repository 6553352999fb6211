"""What ``--prompts`` refuses, in one line and before any weight is read."""

import json
import math
from pathlib import Path

import pytest

from tests.driver.drive import Drive
from tests.driver.test_prompts import write_lines

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not valid JSON (Expecting value at column 1)"),
        ('{"prompt": ', "not valid JSON (Expecting value at column 12)"),
        ('{"prompt": "a", "prompt": "b"}', "not valid JSON (the key 'prompt' occurs twice)"),
        ('{"messages": [], "tools": [-Infinity]}', "not valid JSON (found -Infinity, expected"),
        ("[" * 100_000, "not valid JSON ("),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not valid JSON (found an integer"),
        ("[1]", "found a JSON list, expected an object"),
        ({}, "found neither prompt nor messages, expected one of them"),
        ({"prompt": "a", "messages": []}, "found both prompt and messages, expected one of them"),
        ({"prompt": "a", "top-k": 1}, "top-k: found an unknown key, expected id, prompt, "),
        ({"prompt": "a", "model": "x"}, "model: found an unknown key, expected id, prompt, "),
        ({"prompt": 3}, "prompt: found 3, expected a string"),
        ({"prompt": ""}, "prompt: found no text, expected a prompt"),
        ({"prompt": "\ud800"}, "prompt: found a lone surrogate at character 0"),
        ({"prompt": "a", "system": "\ud800"}, "system: found a lone surrogate at character 0"),
        ({"prompt": "a", "tools": [TOOL]}, "tools: found with prompt, expected messages"),
        ({"messages": "a"}, "messages: found 'a', expected a list"),
        ({"messages": []}, "messages: found no messages, expected a question or the result of"),
        (
            {"messages": [{"role": "pirate"}]},
            "messages: messages[0]: unknown role 'pirate', expected system, user",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "messages: messages[0].content: found a",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            'tools[0] has no object "function"',
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "system": "b"},
            "system: found together with messages, which holds its own system message",
        ),
        ({"prompt": "a", "id": 1.5}, "id: found 1.5, expected a string or an integer"),
        ({"prompt": "a", "id": True}, "id: found True, expected a string or an integer"),
        ({"prompt": "a", "id": None}, "id: found None, expected a string or an integer"),
        ({"prompt": "a", "id": 1}, "id: found 1, which line 1 has too, expected another one"),
        ({"prompt": "a", "temperature": "0.5"}, "temperature: found '0.5', expected a number"),
        ({"prompt": "a", "temperature": True}, "temperature: found True, expected a number"),
        ({"prompt": "a", "temperature": -1}, "temperature: found '-1', expected a number from 0"),
        ({"prompt": "a", "temperature": math.nan}, "not valid JSON (found NaN, expected a finite"),
        ({"prompt": "a", "top_p": 0}, "top_p: found '0', expected a number above 0 to 1"),
        ({"prompt": "a", "min_p": 2}, "min_p: found '2', expected a number from 0 to 1"),
        ({"prompt": "a", "top_k": 2.0}, "top_k: found '2.0', expected an integer from 0"),
        ({"prompt": "a", "seed": 2**63}, "seed: found '9223372036854775808', expected an integer"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: found '0', expected an integer from 1"),
        ({"prompt": "a", "max_tokens": None}, "max_tokens: found None, expected a number"),
        (
            {"prompt": "a", "logprobs": 1001},
            "logprobs: found '1001', expected an integer from 0 to",
        ),
        ({"prompt": "a", "stop": [""]}, "stop: found an empty string, expected some characters"),
        ({"prompt": "a", "stop": [1]}, "stop: found [1], expected a string or a list of strings"),
        ({"prompt": "a", "raw": "yes"}, "raw: found 'yes', expected true or false"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos: found 1, expected true or false"),
        ({"prompt": "a", "thinking": True}, "thinking: found True, expected a string"),
        ({"prompt": "a", "thinking": "so"}, "thinking: invalid choice: 'so' (choose from "),
        (
            {"prompt": "a", "reasoning_effort": "max"},
            "reasoning_effort: found with thinking off, expected thinking on",
        ),
        (
            {"prompt": "a", "raw": True, "thinking": "on"},
            "raw: found together with thinking on, which needs the chat encoding",
        ),
        (
            {"prompt": "a", "temperature": 0, "seed": 1},
            "seed: found with greedy decoding (by temperature), expected temperature above 0",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_wrong_line_is_named_before_anything_is_read(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: object, message: str
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("dsv4.opened_checkpoint.loading_ranks", load)
    prompts = write_lines(tmp_path / "prompts", [{"prompt": "a"}, line, {"prompt": "b"}])
    result = drive("--prompts", prompts, "--out", tmp_path / "answers")
    result.assert_user_error(f"--prompts: {prompts}: line 2: {message}")
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "found no lines, expected at least 1"),
        (b'{"prompt": "a\xff"}\n', "line 1: byte 13 is not UTF-8"),
        (b"\xef\xbb\xbf", "found no lines, expected at least 1"),
        (b'\xef\xbb\xbf{"prompt": 3}\n', "line 1: prompt: found 3, expected a string"),
        (b'{"prompt": "a"}\n\xef\xbb\xbf{}', "line 2: not valid JSON (found a byte order"),
        (b'{"prompt": "a"}\n\n', "line 2: not valid JSON"),
    ],
)
def test_a_file_that_holds_no_lines(drive: Drive, tmp_path: Path, raw: bytes, message: str) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_bytes(raw)
    result = drive("--prompts", prompts, "--out", tmp_path / "answers")
    result.assert_user_error(f"--prompts: {prompts}: {message}")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--prompts p", ["--prompts: found without --out"]),
        ("--out o", ["--out: found without --prompts"]),
        ("--with-token-ids", ["--with-token-ids: found without --prompts"]),
        ("--prompts p --out o --prompt a", ["--prompt", "not allowed with"]),
        ("--prompts p --out o --prompt-file a", ["--prompt-file", "not allowed with"]),
        ("--prompts p --out o --messages a", ["--messages", "not allowed with"]),
        ("--prompts p --out o --token-ids a", ["--token-ids", "not allowed with"]),
        ("--prompts p --out o --json a", ["--json: found together with --prompts"]),
        ("--prompts p --out o --trace a", ["--trace: found together with --prompts"]),
        ("--prompts p --out o --trace-at a", ["--trace-at: found together with --prompts"]),
        ("--prompts p --out o --profile", ["--profile: found together with --prompts"]),
        ("--prompts p --out o --plan", ["--plan: found together with --prompts"]),
        *(
            (f"--prompts p --out o {flag} a", [f"{flag}: found together with --prompts"])
            for flag in ("--save-state", "--load-state", "--tools")
        ),
        ("--prompts p --out o --raw --system a", ["--raw", "--system"]),
        ("--prompts p --out o --temperature 0 --seed 1", ["--seed: found with greedy"]),
        ("--prompts /no/such --out o", ["--prompts: /no/such: cannot be read"]),
    ],
)
def test_flags_that_do_not_go_together(drive: Drive, flags: str, parts: list[str]) -> None:
    drive(*flags.split()).assert_user_error(*parts)
