"""``--prompts``: every line is a run of its own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsv4.cli.arguments import parse_arguments
from dsv4.cli.flags import build_parser
from dsv4.cli.prompts.settings import line_arguments
from dsv4.demo import CHECKPOINT
from dsv4.errors import UserError
from encoding import Tokenizer
from tests.driver.conftest import read_json
from tests.driver.drive import Drive

SHORT = {"max_tokens": 4, "ignore_eos": True}


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
    """Values too large, from the embedding of one token; a prompt that the context cannot hold."""
    (token,) = Tokenizer(CHECKPOINT).encode("7")
    for shard in broken_copy.glob("*.safetensors"):
        tensors = load_file(shard)
        if "embed.weight" in tensors:
            tensors["embed.weight"][token] = 3e38
            save_file(tensors, shard)
    good = {"prompt": "Hi", "temperature": 0, **SHORT}
    lines = [good, {"prompt": "7 days", **SHORT}, {"prompt": "a b " * 100}, {**good, "id": "end"}]
    prompts = write_lines(tmp_path / "prompts", lines)
    out = tmp_path / "answers"
    flags = ("--model", broken_copy, "--prompts", prompts, "--out", out, "--max-context", 50)
    result = drive(*flags)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("answered 2 · failed 2 · prompts ")
    first, huge, long, last = read_lines(out)
    assert " in layers.0." in huge["error"]
    assert "--max-context: found a prompt of" in long["error"]
    assert (huge.keys(), long.keys()) == ({"id", "request", "error"},) * 2
    assert last["completion"] == first["completion"]
    again = drive(*flags)
    assert (again.code, len(read_lines(out))) == (1, 4)
    assert again.err.startswith("answered 0 · failed 0 · there before 4 · ")


def test_a_default_of_plain_text_means_nothing_beside_messages() -> None:
    """As --system does not; a line that says so itself is refused."""
    defaults = parse_arguments(["--prompts", "p", "--out", "o", "--raw"])
    line = {"messages": [{"role": "user", "content": "a"}]}
    arguments = line_arguments(build_parser(), defaults, line)
    assert not arguments.raw
    assert line_arguments(build_parser(), defaults, {"prompt": "a"}).raw
    with pytest.raises(UserError, match="^raw: found together with messages"):
        line_arguments(build_parser(), defaults, {**line, "raw": True})
