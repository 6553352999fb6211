"""``--prompts``: every line is a run of its own, and what is wrong with a line."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsv4.demo import CHECKPOINT
from encoding import Tokenizer
from tests.driver.conftest import read_json
from tests.driver.drive import Drive

SHORT = {"max_tokens": 4, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """The objects as lines of JSON, text as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every answer of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.slow
def test_every_answer_is_that_of_a_run_for_its_line_alone(drive: Drive, tmp_path: Path) -> None:
    """On the demo, in a larger context: greedy, sampled, raw, with tools, stopped; some twice."""
    weather = json.loads(Path("docs/examples/weather.json").read_text())
    runs: list[tuple[dict[str, Any], list[object]]] = [
        ({"prompt": "What is 29 + 27?", "thinking": "on"}, ["--thinking", "on"]),
        (
            {"prompt": "Tell me a story.", "temperature": 0.9, "seed": 5, "max_tokens": 12},
            ["--temperature", 0.9, "--seed", 5, "--max-tokens", 12],
        ),
        (
            {"prompt": "The capital", "raw": True, "max_tokens": 9, "logprobs": 2},
            ["--raw", "--max-tokens", 9, "--logprobs", 2],
        ),
        (weather, ["--messages", "docs/examples/weather.json"]),
        ({"prompt": "What is 29 + 27?", "stop": "6"}, ["--stop", "6"]),
    ]
    report = tmp_path / "report.json"
    expected = {}
    for place, (line, flags) in enumerate(runs):
        prompt = ["--prompt", line["prompt"]] if "prompt" in line else []
        drive("--model", CHECKPOINT, "--max-context", 400, *flags, *prompt, "--json", report)
        found = read_json(report)
        expected[place] = {
            key: found[key] for key in ("prompt", "completion", "finish_reason", "stop_string")
        }
    lines = [{"id": place, **line} for place, (line, _) in enumerate(runs)]
    again = [{**line, "id": line["id"] + len(lines)} for line in lines[2::-1]]
    prompts = write_lines(tmp_path / "prompts", [*lines, *again])
    out = tmp_path / "answers"
    flags = ("--model", CHECKPOINT, "--prompts", prompts, "--out", out, "--with-token-ids")
    assert drive(*flags).code == 0
    answers = read_lines(out)
    assert [answer["id"] for answer in answers] == [line["id"] for line in [*lines, *again]]
    for answer in answers:
        alone = expected[answer["id"] % len(lines)]
        assert {key: answer[key] for key in alone} == alone
        assert answer["tokens"] == {
            "prompt": len(alone["prompt"]["token_ids"]),
            "completion": len(alone["completion"]["token_ids"]),
        }
    assert answers[0]["sampling"]["seed"] is None
    assert answers[1]["sampling"]["seed"] == 5
    assert answers[3]["completion"]["message"]["tool_calls"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [[], ["--cuda-graph", "full"]], ids=["eager", "full"])
def test_on_a_gpu_every_answer_is_that_of_a_run_alone(
    drive: Drive, tmp_path: Path, mode: list[object]
) -> None:
    report = tmp_path / "report.json"
    flags = ("--device", "cuda", "--ignore-eos", "--max-tokens", 20, *mode)
    lines = [{"prompt": "a", "temperature": 0}, {"prompt": "b " * 300, "seed": 4}]
    prompts = write_lines(tmp_path / "prompts", [*lines, *lines])
    assert drive(*flags, "--prompts", prompts, "--out", tmp_path / "answers").code == 0
    answers = [answer["completion"]["text"] for answer in read_lines(tmp_path / "answers")]
    assert answers[:2] == answers[2:]
    for line, found in zip(lines, answers, strict=False):
        own = ["--seed", 4] if "seed" in line else ["--temperature", 0]
        drive(*flags, *own, "--prompt", line["prompt"], "--json", report)
        assert read_json(report)["completion"]["text"] == found


def test_flags_are_the_defaults_of_lines(drive: Drive, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "temperature": 0, "max_tokens": 1, "stop": []},
        {"messages": [{"role": "user", "content": "a"}], "thinking": "off", "seed": 8},
        {"prompt": "a", "raw": True, "top_k": 3, "with_token_ids": False},
    ]
    prompts = write_lines(tmp_path / "prompts", lines)
    out = tmp_path / "answers"
    flags = "--system S --thinking on --reasoning-effort max --top-k 7 --seed 3 --max-tokens 2"
    more = ("--ignore-eos", "--with-token-ids", "--logprobs", 1, "--quiet")
    result = drive("--prompts", prompts, "--out", out, *flags.split(), *more)
    assert (result.code, result.out, result.err) == (0, "", "")
    first, greedy, messages, raw = read_lines(out)
    assert first["prompt"]["text"].startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute")
    assert first["prompt"]["text"].endswith("S<｜User｜>a<｜Assistant｜><think>")
    assert messages["prompt"]["text"] == "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>"
    assert (raw["prompt"], raw["completion"]["token_ids"]) == (None, None)
    kept = [(one["sampling"]["top_k"], one["sampling"]["seed"]) for one in read_lines(out)]
    assert kept == [(7, 3), (0, None), (7, 8), (3, 3)]
    assert [one["tokens"]["completion"] for one in read_lines(out)] == [2, 1, 2, 2]
    assert [one["id"] for one in read_lines(out)] == [1, 2, 3, 4]
    assert len(greedy["completion"]["logprobs"]) == 1


def test_a_terminal_shows_how_many_are_answered(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    prompts = write_lines(tmp_path / "prompts", [{"prompt": "a", **SHORT}] * 2)
    shown = drive("--prompts", prompts, "--out", tmp_path / "answers").err
    assert "answers ────────────────────   0 %  0 of 2 answers" in shown
    assert drive("--prompts", prompts, "--out", tmp_path / "others", "--quiet").err == ""


def test_a_prompt_that_no_context_holds_makes_none_larger(
    drive: Drive, broken_copy: Path, tmp_path: Path
) -> None:
    """One that must have too many tokens, and one whose tokens have to be counted."""
    config = json.loads((broken_copy / "config.json").read_text())
    (broken_copy / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 9000})
    )
    lines = [{"prompt": "a " * 9001}, {"prompt": "a " * 1_000_000}, {"prompt": "a", **SHORT}]
    prompts = write_lines(tmp_path / "prompts", lines)
    out = tmp_path / "answers"
    assert drive("--model", broken_copy, "--prompts", prompts, "--out", out).code == 1
    counted, unread, answered = read_lines(out)
    assert counted["error"].endswith(" tokens, expected at most 8192")
    assert unread["error"].startswith("--max-context: found a prompt of at least ")
    assert answered["tokens"]["completion"] == 4


def test_a_line_that_fails_is_told_and_the_others_are_answered(
    drive: Drive, broken_copy: Path, tmp_path: Path
) -> None:
    """NaN from the embedding of one token; a prompt that the context cannot hold."""
    (token,) = Tokenizer(CHECKPOINT).encode("7")
    for shard in broken_copy.glob("*.safetensors"):
        tensors = load_file(shard)
        if "embed.weight" in tensors:
            tensors["embed.weight"][token] = math.nan
            save_file(tensors, shard)
    good = {"prompt": "Hi", "temperature": 0, **SHORT}
    lines = [good, {"prompt": "7 days", **SHORT}, {"prompt": "a b " * 100}, {**good, "id": "end"}]
    prompts = write_lines(tmp_path / "prompts", lines)
    out = tmp_path / "answers"
    flags = ("--model", broken_copy, "--prompts", prompts, "--out", out, "--max-context", 50)
    result = drive(*flags)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("answered 2 · failed 2 · prompts ")
    first, nan, long, last = read_lines(out)
    assert nan["error"].startswith("NaN in ")
    assert "--max-context: found a prompt of" in long["error"]
    assert (nan.keys(), long.keys()) == ({"id", "request", "error"},) * 2
    assert last["completion"] == first["completion"]
    again = drive(*flags)
    assert (again.code, len(read_lines(out))) == (1, 4)
    assert again.err.startswith("answered 0 · failed 0 · there before 4 · ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not valid JSON (Expecting value at column 1)"),
        ('{"prompt": ', "not valid JSON (Expecting value at column 12)"),
        ('{"prompt": "a", "prompt": "b"}', "not valid JSON (the key 'prompt' occurs twice)"),
        ("[" * 100_000, "not valid JSON ("),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not valid JSON ("),
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
        ({"messages": []}, "messages: found no messages, expected one of user, tool or developer"),
        (
            {"messages": [{"role": "pirate"}]},
            "messages: unknown role 'pirate', expected system, user",
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
        ({"prompt": "a", "temperature": math.nan}, "temperature: found 'nan', expected a number"),
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

    monkeypatch.setattr("dsv4.opened_checkpoint.load_weights", load)
    prompts = write_lines(tmp_path / "prompts", [{"prompt": "a"}, line, {"prompt": "b"}])
    result = drive("--prompts", prompts, "--out", tmp_path / "answers")
    result.assert_user_error(f"--prompts: {prompts}: line 2: {message}")
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "found no lines, expected at least 1"),
        (b'{"prompt": "a\xff"}\n', "line 1: byte 13 is not UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "a"}\n', "line 1: not valid JSON (Unexpected UTF-8 BOM"),
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
        ("--prompts p --out o --raw --system a", ["--raw", "--system"]),
        ("--prompts p --out o --temperature 0 --seed 1", ["--seed: found with greedy"]),
        ("--prompts /no/such --out o", ["--prompts: /no/such: cannot be read"]),
    ],
)
def test_flags_that_do_not_go_together(drive: Drive, flags: str, parts: list[str]) -> None:
    drive(*flags.split()).assert_user_error(*parts)
