"""The driver from flags to text and report, in this process."""

import json
import re
from pathlib import Path

import pytest

from encoding import Tokenizer
from tests.driver.conftest import Result, read_json
from tests.driver.drive import Drive

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_answer_goes_to_stdout_and_one_summary_line_to_stderr(drive: Drive) -> None:
    result = drive("--prompt", "Hello", "--max-tokens", 5, "--seed", 1, "--ignore-eos")
    assert result.code == 0
    assert result.out.endswith("\n")
    measured = (
        r"load N s · prefill \d+ tokens N tok/s · decode 4 tokens N ms/token N tok/s · length\n"
    )
    assert re.fullmatch(measured.replace("N", r"\d+\.\d"), result.err)


def test_quiet_leaves_nothing_but_the_text(drive: Drive) -> None:
    loud = drive("--max-tokens", 8, "--seed", 3)
    quiet = drive("--max-tokens", 8, "--seed", 3, "--quiet")
    assert quiet == Result(0, loud.out, "")


def test_json_report_holds_the_whole_run(drive: Drive, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = drive(
        "--prompt", "Grüße", "--max-tokens", 6, "--seed", 1, "--ignore-eos", "--raw", "--json", path
    )
    report = read_json(path)
    tokenizer = Tokenizer(checkpoint)
    completion = report["completion"]
    assert report["prompt"] == {
        "text": "Grüße",
        "token_ids": [tokenizer.bos_id, *tokenizer.encode("Grüße")],
    }
    assert len(completion["token_ids"]) == 6
    assert completion["text"] == result.out.removesuffix("\n")
    assert completion["message"] == {"role": "assistant", "content": completion["text"]}
    assert report["finish_reason"] == "length"
    assert report["timing"]["prefill_tokens"] == len(report["prompt"]["token_ids"])
    assert report["timing"]["decode_tokens"] == 5
    assert report["timing"]["decode_ms_per_token"] > 0
    config = report["config"]
    assert config["arguments"]["model"] == str(checkpoint)
    assert config["arguments"]["max_tokens"] == 6
    assert config["engine"]["kv_dtype"] == "fp8"
    assert config["model"]["num_hidden_layers"] == 4
    assert config["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1,
        "top_k": 0,
        "logprobs": None,
    }
    assert report["devices"]
    assert report["ops"] in ("torch", "cuda")
    assert set(report["provenance"]["versions"]) == {"dsv4", "nvrtc", "python", "torch"}
    assert report["provenance"]["commit"]


def test_json_file_is_replaced_whole_and_leaves_no_temporary_file(
    drive: Drive, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    drive("--max-tokens", 1, "--json", path)
    assert read_json(path)["finish_reason"] in ("length", "stop")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_seed_repeats_its_tokens_and_greedy_needs_none(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def tokens(*flags: object) -> list[int]:
        assert drive("--max-tokens", 4, "--ignore-eos", "--json", path, *flags).code == 0
        return read_json(path)["completion"]["token_ids"]

    assert tokens("--seed", 7) == tokens("--seed", 7)
    assert tokens("--seed", 7) != tokens("--seed", 8)
    assert tokens("--temperature", 0) == tokens("--temperature", 0)
    assert read_json(path)["config"]["sampling"]["seed"] is None
    assert tokens("--top-p", 1e-9) == tokens("--temperature", 0)
    assert tokens("--top-k", 1) == tokens("--temperature", 0)


def test_a_drawn_seed_is_recorded_and_repeats_the_run(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--max-tokens", 6, "--ignore-eos", "--json", path)
    drive(*flags)
    first = read_json(path)
    drive(*flags)
    seed = first["config"]["sampling"]["seed"]
    assert 0 <= seed < 2**53
    assert read_json(path)["config"]["sampling"]["seed"] != seed
    drive(*flags, "--seed", seed)
    assert read_json(path)["completion"] == first["completion"]


@pytest.mark.slow
def test_chunk_size_changes_nothing_but_the_steps(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    answers = []
    for chunk in (3, 512):
        drive(
            "--temperature",
            0,
            "--max-tokens",
            4,
            "--kv-dtype",
            "bf16",
            "--prefill-chunk",
            chunk,
            "--json",
            path,
        )
        answers.append(read_json(path)["completion"]["token_ids"])
    assert answers[0] == answers[1]


def test_end_of_sequence_stops_and_is_not_shown(
    drive: Drive, broken_copy: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    drive("--temperature", 0, "--max-tokens", 4, "--ignore-eos", "--json", path)
    token_ids = read_json(path)["completion"]["token_ids"]
    generation = {"eos_token_id": [1, token_ids[2]], "do_sample": False}
    (broken_copy / "generation_config.json").write_text(json.dumps(generation))
    drive("--model", broken_copy, "--max-tokens", 4, "--json", path)
    report = read_json(path)
    expected = token_ids[: token_ids.index(token_ids[2])]
    assert (report["completion"]["token_ids"], report["finish_reason"]) == (expected, "stop")
    assert report["config"]["sampling"]["temperature"] == 0.0


@pytest.mark.slow
def test_ignored_end_of_sequence_is_neither_the_end_nor_shown(
    drive: Drive, checkpoint: Path, broken_copy: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    plain = drive("--raw", "--temperature", 0, "--max-tokens", 4, "--ignore-eos", "--json", path)
    token_ids = read_json(path)["completion"]["token_ids"]
    (broken_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": token_ids[1]}))
    flags = ("--raw", "--temperature", 0, "--max-tokens", 4, "--ignore-eos", "--json", path)
    result = drive("--model", broken_copy, *flags)
    assert read_json(path)["completion"]["token_ids"] == token_ids
    shown = [token for token in token_ids if token != token_ids[1]]
    assert result.out == Tokenizer(checkpoint).decode(shown) + "\n" != plain.out


def test_flags_win_over_generation_config(drive: Drive, broken_copy: Path, tmp_path: Path) -> None:
    generation = '{"temperature": 0.5, "top_p": 0.25, "top_k": 20}'
    (broken_copy / "generation_config.json").write_text(generation)
    path = tmp_path / "report.json"
    drive("--model", broken_copy, "--max-tokens", 1, "--temperature", 0.75, "--json", path)
    sampling = read_json(path)["config"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.75, 0.25, 20)
    drive("--model", broken_copy, "--max-tokens", 1, "--top-k", 1, "--json", path)
    assert read_json(path)["config"]["sampling"]["top_k"] == 1


def test_full_context_ends_the_run(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    drive(
        "--raw",
        "--prompt",
        "a",
        "--max-context",
        6,
        "--max-tokens",
        50,
        "--ignore-eos",
        "--json",
        path,
    )
    report = read_json(path)
    assert report["finish_reason"] == "context"
    assert len(report["prompt"]["token_ids"]) + len(report["completion"]["token_ids"]) == 7


def test_long_prompts_widen_the_context_by_themselves(drive: Drive, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    assert "8,192 tokens" in drive("--plan").out
    prompt.write_text("one two three four " * 2500)
    planned = re.search(r"context of ([\d,]+) tokens", drive("--prompt-file", prompt, "--plan").out)
    assert planned is not None
    assert int(planned[1].replace(",", "")) > 10_000
    long = drive("--prompt-file", prompt, "--max-tokens", 1, "--max-context", 1000)
    long.assert_user_error("--max-context", "at most 1000")


def test_messages_with_tools_are_encoded(drive: Drive, tmp_path: Path) -> None:
    conversation = tmp_path / "messages.json"
    path = tmp_path / "report.json"
    messages = [{"role": "user", "content": "Weather in Oslo?"}]
    conversation.write_text(json.dumps({"messages": messages, "tools": [WEATHER_TOOL]}))
    drive("--messages", conversation, "--thinking", "on", "--max-tokens", 3, "--json", path)
    prompt = read_json(path)["prompt"]["text"]
    assert "### Available Tool Schemas" in prompt
    assert '"name": "get_weather"' in prompt
    assert prompt.endswith("<｜User｜>Weather in Oslo?<｜Assistant｜><think>")


def test_system_message_and_thinking_reach_the_prompt(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = (
        "--system",
        "Be brief.",
        "--prompt",
        "Hi",
        "--thinking",
        "on",
        "--reasoning-effort",
        "max",
    )
    drive(*flags, "--max-tokens", 1, "--json", path)
    prompt = read_json(path)["prompt"]["text"]
    assert prompt.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")
    assert prompt.endswith("Be brief.<｜User｜>Hi<｜Assistant｜><think>")


def test_raw_prompt_is_the_text_after_the_beginning_token(
    drive: Drive, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    tokenizer = Tokenizer(checkpoint)
    for text in ("The capital", "<｜begin▁of▁sentence｜>The capital"):
        drive("--raw", "--prompt", text, "--max-tokens", 1, "--json", path)
        token_ids = read_json(path)["prompt"]["token_ids"]
        assert token_ids == [tokenizer.bos_id, *tokenizer.encode("The capital")]


@pytest.mark.gpu
def test_cuda_device_answers_and_is_named(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert (
        drive(
            "--device", "cuda", "--max-tokens", 4, "--ignore-eos", "--profile", "--json", path
        ).code
        == 0
    )
    report = read_json(path)
    assert len(report["completion"]["token_ids"]) == 4
    assert report["devices"][0].startswith("cuda:0 ")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["auto", "split", "full"])
def test_cuda_graph_answers_like_eager(drive: Drive, mode: str) -> None:
    flags = ("--device", "cuda", "--seed", 1)
    eager = drive(*flags)
    graph = drive(*flags, "--cuda-graph", mode)
    assert (graph.code, graph.out) == (0, eager.out)
    assert "(cuda graph " in graph.err
