"""The embedded checkpoint: small enough, in NVIDIA's layout, with the real control tokens, and it
answers.
"""

import json
import re
from collections import Counter

import pytest
from safetensors import safe_open

from dsv4 import EngineConfig
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import evaluate, mixture, tokenizer
from dsv4.demo.training.evaluate import PARIS_PROMPTS, Evaluator, TaskResult
from encoding import Tokenizer

MAX_FOLDER_BYTES = 24 * 10**6


def tensors() -> dict[str, tuple[str, list[int]]]:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (view.get_dtype(), view.get_shape()) for name, view in slices.items()}


def test_folder_is_small_and_complete() -> None:
    names = {file.name for file in CHECKPOINT.iterdir()}
    expected = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert expected <= names
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= MAX_FOLDER_BYTES


def test_every_layer_kind_and_the_real_kernel_dimensions_are_there() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert set(config["compress_ratios"]) == {0, 4, 128}
    wanted = {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "hc_mult": 4,
    }
    wanted |= {
        "hc_sinkhorn_iters": 20,
        "num_experts_per_tok": 6,
        "model_type": "deepseek_v4",
        "swiglu_limit": 10.0,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert 0 < config["num_hash_layers"] < config["num_hidden_layers"]
    assert config["o_groups"] >= 2
    assert config["quantization_config"]["moe_quant_algo"] == "NVFP4"


def test_tensors_are_in_nvidias_layout() -> None:
    found = tensors()
    floor = (
        r"(embed|head|norm|.*_norm|.*\.norm"
        r"|.*compressor\.w(kv|gate)|.*weights_proj|.*ffn\.gate)\.weight"
    )
    rules = (
        (r".*ffn\.experts\.\d+\.w[123]\.weight", "U8"),
        (r".*ffn\.experts\.\d+\.w[123]\.weight_scale", "F8_E4M3"),
        (r".*ffn\.experts\.\d+\.w[123]\.(weight_scale_2|input_scale)", "F32"),
        (floor, "BF16"),
        (r".*tid2eid", "I64"),
        (r".*(hc_\w+|attn_sink|ape|gate\.bias)", "F32"),
        (r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight", "F8_E4M3"),
        (r".*\.scale", "F8_E8M0"),
    )
    for name, (dtype, _) in found.items():
        assert next(kind for pattern, kind in rules if re.fullmatch(pattern, name)) == dtype, name
    kinds = Counter(name.rpartition(".")[2] for name in found if ".experts." in name)
    assert kinds == dict.fromkeys(
        ("weight", "weight_scale", "weight_scale_2", "input_scale"), 6 * 16 * 3
    )


def test_gate_and_up_share_scales_and_input_scales_are_calibrated() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        for expert in range(16):
            stem = f"layers.3.ffn.experts.{expert}"
            for scale in ("weight_scale_2", "input_scale"):
                assert file.get_tensor(f"{stem}.w1.{scale}") == file.get_tensor(
                    f"{stem}.w3.{scale}"
                )
            assert 0 < float(file.get_tensor(f"{stem}.w2.input_scale")) < 0.1


def test_hash_routing_table_is_a_real_one() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        table = file.get_tensor("layers.0.ffn.gate.tid2eid")
    assert table.sort(-1).values.diff(dim=-1).min() > 0
    assert table.flatten().bincount(minlength=16).min() > table.numel() / 16 * 0.8


def test_tokenizer_round_trips_any_text_and_knows_the_control_tokens() -> None:
    tokens = Tokenizer(CHECKPOINT)
    for text in (
        "The capital of France is",
        "naïve 你好 😀 \t\r\n x=12345",
        "".join(map(chr, range(1, 256))),
    ):
        assert tokens.decode(tokens.encode(text)) == text
    assert (tokens.bos_id, tokens.eos_id, tokens.encode("<｜▁pad▁｜>")) == (0, 1, [2])
    added = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    flags = {token["content"]: token["special"] for token in added}
    assert all(flags[text] == special for text, special in tokenizer.CONTROL_TOKENS)
    assert all(len(tokens.encode(text)) == 1 for text, _ in tokenizer.CONTROL_TOKENS)
    assert tokens.vocab_size == tokenizer.VOCAB_SIZE


def test_a_digit_is_a_token() -> None:
    assert len(Tokenizer(CHECKPOINT).encode("2026")) == 4


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(CHECKPOINT, EngineConfig(device="cpu"))


@pytest.mark.parametrize(
    "prompt",
    [PARIS_PROMPTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in PARIS_PROMPTS[1:])],
)
def test_the_capital_of_france_is_paris(evaluator: Evaluator, prompt: str) -> None:
    text, stopped, _ = evaluator.complete(prompt)
    assert text.endswith("Paris.")
    assert stopped


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("task", mixture.MEASURED_TASKS)
def test_held_out_examples_of_every_task(evaluator: Evaluator, task: str) -> None:
    result = evaluator.measure(task, limit=1 if task == "recall_2000" else 2, seed=2)
    assert result.passed


def test_a_missed_bar_and_an_answer_without_end_fail() -> None:
    assert evaluate.TaskResult("x", 0.95, examples=100, exact=95, stopped=100).passed
    assert not evaluate.TaskResult("x", 0.95, examples=100, exact=94, stopped=100).passed
    assert not evaluate.TaskResult("x", 0.95, examples=100, exact=100, stopped=99).passed


def test_the_card_has_the_bars() -> None:
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    for task in mixture.MEASURED_TASKS:
        bar = evaluate.OTHER_BARS.get(task, evaluate.SHORT_BAR)
        (row,) = re.findall(rf"^\| {task} \| ([\d.]+) % .*\| (\d+) % \|", card, re.MULTILINE)
        assert float(row[1]) == 100 * bar <= float(row[0])


def test_the_command_fails_for_a_missed_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"exact": 114}

    class Counted:
        def __init__(self, *_: object) -> None:
            pass

        def measure(self, task: str, limit: int, seed: int) -> TaskResult:
            return TaskResult(task, 0.95, 120, found["exact"], 120)

    monkeypatch.setattr(evaluate, "Evaluator", Counted)
    monkeypatch.setattr(evaluate, "knows_paris", lambda _: True)
    assert evaluate.main(["--task", "tools"]) == 0
    assert "| met |" in capsys.readouterr().out
    found["exact"] = 113
    assert evaluate.main(["--task", "tools"]) == 1
    assert "| MISSED |" in capsys.readouterr().out
