"""``--stop`` and ``--logprobs``: where the text ends, and how likely its tokens were."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.cli.answer import answer
from dsv4.cli.job import Outcome
from dsv4.cli.stream import TokenText
from dsv4.demo import CHECKPOINT
from dsv4.encoding import Tokenizer
from tests.driver.conftest import read_json
from tests.driver.drive import Drive

DEMO = ("--model", CHECKPOINT, "--prompt", "What is 29 + 27?", "--thinking", "on")
GREEDY = (*DEMO, "--temperature", 0, "--device", "cpu")


@pytest.mark.slow
def test_a_stop_string_across_tokens_ends_text_and_run(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    free = drive(*GREEDY, "--json", path)
    assert free.out == "<think>\n29 + 27 = 56.\n</think>\n56\n"
    every = read_json(path)["completion"]["token_ids"]
    result = drive(*GREEDY, "--stop", "nothing", "--stop", "27 = 5", "--json", path)
    assert (result.code, result.out) == (0, "<think>\n29 + \n</think>\n")
    report = read_json(path)
    completion = report["completion"]
    assert (report["finish_reason"], report["stop_string"]) == ("stop", "27 = 5")
    assert completion["text"] == "29 + "
    assert completion["message"]["reasoning_content"] == "29 + "
    taken = len(completion["token_ids"])
    assert completion["token_ids"] == every[:taken]
    assert Tokenizer(CHECKPOINT).decode(every[:taken]) == "29 + 27 = 5"


@pytest.mark.slow
def test_what_only_looks_like_a_stop_string_is_shown(drive: Drive) -> None:
    result = drive(*GREEDY, "--stop", "56!", "--stop", "56</think>")
    assert result.out == "<think>\n29 + 27 = 56.\n</think>\n56\n"


def test_half_a_character_at_the_limit_may_be_the_stop_string() -> None:
    tokenizer = Tokenizer(CHECKPOINT)
    ids = tokenizer.encode("a🜨")[:-1]
    arguments = SimpleNamespace(max_tokens=len(ids), ignore_eos=False, stop=["\ufffd"])
    prompt = SimpleNamespace(token_ids=[1])
    job: Any = SimpleNamespace(
        arguments=arguments, eos_token_ids=frozenset(), prompt=prompt, sampling=None
    )
    engine: Any = SimpleNamespace(
        generate=lambda *_, **__: (token for token in ids),
        last_run=SimpleNamespace(finish_reason="length"),
    )
    outcome = Outcome()
    text = TokenText(tokenizer, arguments.stop)
    shown = "".join(answer(job, engine, outcome, text)) + text.finish()
    assert (shown, outcome.finish_reason, outcome.stop_string) == ("a", "stop", "\ufffd")


def test_log_probabilities_of_every_token(drive: Drive, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    drive("--max-tokens", 3, "--ignore-eos", "--seed", 1, "--logprobs", 2, "--json", path)
    completion = read_json(path)["completion"]
    logprobs = completion["logprobs"]
    assert [entry["token_id"] for entry in logprobs] == completion["token_ids"]
    for entry in logprobs:
        first, second = entry["top"]
        assert 0 >= first["logprob"] >= second["logprob"] > -math.inf
        assert entry["logprob"] <= first["logprob"]
        for one in (entry, first, second):
            assert one["text"] == Tokenizer(checkpoint).decode([one["token_id"]])
    drive("--max-tokens", 1, "--json", path)
    assert read_json(path)["completion"]["logprobs"] is None


@pytest.mark.parametrize("as_line", [False, True])
def test_infinite_logits_are_an_error_and_no_log_probabilities(
    drive: Drive, broken_copy: Path, tmp_path: Path, as_line: bool
) -> None:
    (shard,) = broken_copy.glob("*.safetensors")
    tensors = load_file(shard)
    # Loading refuses infinite weights: products of finite ones are.
    tensors["norm.weight"][0] = 1e30
    rows_2E = tensors["head.weight"][:2].zero_()
    rows_2E[:, 0] = torch.tensor([1e30, -1e30])
    save_file(tensors, shard)
    path = tmp_path / "found.json"
    flags = ["--model", broken_copy, "--temperature", 0]
    if as_line:
        prompts = tmp_path / "prompts"
        prompts.write_text('{"prompt": "Hello", "logprobs": 2}\n')
        assert drive(*flags, "--prompts", prompts, "--out", path).code == 1
        assert read_json(path)["error"].startswith("infinity in logits at position ")
        return
    result = drive(*flags, "--prompt", "Hello", "--logprobs", 2, "--json", path)
    result.assert_user_error("infinity in logits at position ")


def test_wrong_values(drive: Drive) -> None:
    drive("--stop", "").assert_user_error("--stop", "empty")
    drive("--logprobs", 3).assert_user_error("--logprobs", "--json")
    drive("--logprobs", 1001, "--json", "x.json").assert_user_error("--logprobs", "to 1000")
