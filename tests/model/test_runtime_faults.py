"""Known faults of the runtime and of speculative modules: rows F, G, H and L13 to L16 of
docs/regressions.md.
"""

import dataclasses
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig, SamplingParams
from dsv4.checkpoint import tiny_config, write_synthetic
from dsv4.errors import UserError
from dsv4.layers.classic_mtp import ClassicMTP
from dsv4.layers.dspark import DSpark
from dsv4.ops import TORCH
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.weights.parameters import MtpKind, parameters
from dsv4.weights.quant import QuantTensor, Weight
from tests.model.tiny import random_ids, small_config, tiny_engine

GREEDY = SamplingParams(temperature=0)
NAN_TOKEN_ID = 7
DSPARK = {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 9,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}


def test_spec11_f38_f39_tokens_do_not_depend_on_how_many_are_fed_at_once() -> None:
    engine = tiny_engine(max_context=128)
    prompt = random_ids(30)
    one_by_one = list(engine.generate(prompt, 24, GREEDY, frozenset()))
    engine.reset()
    engine.prefill(prompt)
    eight_by_eight = torch.cat(
        [engine.decode(one_by_one[start : start + 8]) for start in range(0, 24, 8)]
    )
    assert eight_by_eight.argmax(-1).tolist()[:-1] == one_by_one[1:]


def engine_with_a_nan_embedding(**settings: Any) -> Engine:
    """Only token ``NAN_TOKEN_ID`` brings NaN into the model."""
    engine = tiny_engine(**settings)
    table = engine.model.embed.table_VE.clone()
    table[NAN_TOKEN_ID] = math.nan
    embed = dataclasses.replace(engine.model.embed, table_VE=table)
    model = dataclasses.replace(engine.model, embed=embed)
    engine.steps.models = (model,)  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def test_spec11_f40_a_nan_row_of_a_rejected_draft_is_no_token_and_leaves_no_trace() -> None:
    engine = engine_with_a_nan_embedding()
    clean = [token for token in random_ids(40) if token != NAN_TOKEN_ID]
    expected = engine.logits(clean[:23])
    engine.reset()
    engine.prefill(clean[:20])
    rows = engine.decode([clean[20], NAN_TOKEN_ID, clean[21]])
    assert bool(rows[1:].isnan().any(-1).all())
    engine.rewind(3)
    torch.testing.assert_close(engine.decode(clean[20:23]), expected[20:23], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_spec11_f40_nan_of_one_sequence_does_not_reach_the_next(kv_dtype: str) -> None:
    engine = engine_with_a_nan_embedding(kv_dtype=kv_dtype)
    clean = [token for token in random_ids(12) if token != NAN_TOKEN_ID]
    expected = engine.logits(clean)
    assert bool(engine.logits([NAN_TOKEN_ID] * 150).isnan().all())
    assert torch.equal(engine.logits(clean), expected)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "sampled"])
def test_spec11_f40_generation_stops_at_the_first_nan(sampling: SamplingParams) -> None:
    def broken_head(hidden_TE: Tensor, weight: Weight) -> Tensor:
        logits_TV = TORCH.vocab_parallel_linear(hidden_TE, weight)
        logits_TV[:, 3] = math.nan if engine.position > 12 else logits_TV[:, 3]
        return logits_TV

    engine = tiny_engine(ops=dataclasses.replace(TORCH, vocab_parallel_linear=broken_head))
    run = engine.generate(random_ids(10), 9, sampling, frozenset())
    produced = [next(run) for _ in range(3)]
    with pytest.raises(FloatingPointError, match="NaN in logits at position 12"):
        next(run)
    assert NAN_TOKEN not in produced


@pytest.mark.slow
def test_spec11_g46_repeated_runs_and_a_fresh_engine_give_the_same_tokens() -> None:
    engine = tiny_engine(kv_dtype="fp8", compute_dtype="bfloat16")
    runs = [list(engine.generate(random_ids(140), 12, GREEDY, frozenset())) for _ in range(3)]
    fresh = tiny_engine(kv_dtype="fp8", compute_dtype="bfloat16")
    runs.append(list(fresh.generate(random_ids(140), 12, GREEDY, frozenset())))
    assert runs == [runs[0]] * 4


def test_lesson_13_a_step_reads_only_buffers_that_the_engine_keeps() -> None:
    # Weights, packed at construction, are the same tensors after many steps: none is made during a
    # step and kept.
    engine = tiny_engine()
    before = [matrix.data.data_ptr() for matrix in packed_matrices(engine)]
    list(engine.generate(random_ids(20), 5, GREEDY, frozenset()))
    assert [matrix.data.data_ptr() for matrix in packed_matrices(engine)] == before


def packed_matrices(engine: Engine) -> list[QuantTensor]:
    parts = [part for block in engine.model.blocks for part in (block.attn, block.ffn)]
    return [
        value for part in parts for value in vars(part).values() if isinstance(value, QuantTensor)
    ]


@pytest.mark.slow
def test_lesson_15_importing_and_running_changes_no_environment_variable() -> None:
    code = """
import os, torch, safetensors.torch, tokenizers
before = dict(os.environ)
import dsv4
from tests.model.tiny import tiny_engine
list(tiny_engine().generate([3, 4, 5], 2))
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_lesson_16_running_prints_and_logs_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    list(tiny_engine().generate(random_ids(20), 5, GREEDY, frozenset()))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_spec11_h49_the_mtp_block_is_a_window_layer_with_a_learned_router() -> None:
    config = ModelConfig.from_dict(small_config((4, 128), 2, num_nextn_predict_layers=1))
    inside = {
        name.removeprefix("mtp.0.")
        for name in parameters(config, "classic")
        if name.startswith("mtp.0.")
    }
    assert not any(part in name for name in inside for part in ("compressor", "indexer", "tid2eid"))
    assert "ffn.gate.bias" in inside


@pytest.mark.parametrize("count", [1, 2, 8])
def test_spec11_h50_the_four_streams_and_not_their_collapse_are_what_a_drafter_can_read(
    count: int,
) -> None:
    engine = tiny_engine()
    trace = engine.trace(random_ids(count))
    last = trace[f"layers.{engine.config.num_hidden_layers - 1}.streams"]
    assert tuple(last.shape) == (count, engine.config.hc_mult, engine.config.hidden_size)
    assert not torch.allclose(last[:, 0], last[:, 1])


@pytest.mark.parametrize(("kind", "config"), [("classic", {}), ("dspark", DSPARK)])
def test_spec11_h51_speculative_weights_are_skipped_or_loaded_knowingly(
    kind: MtpKind, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dsv4")
    raw = tiny_config(max_position_embeddings=4096, **config)
    write_synthetic(tmp_path / "with", raw, "bf16", 0, mtp=kind)
    settings = EngineConfig(device="cpu", max_context=64)
    skipped = Engine.load(tmp_path / "with", settings)
    assert skipped.draft_modules == []
    assert f"skipping the mtp tensors ({kind})" in caplog.text
    flag: Any = "mtp" if kind == "classic" else "dspark"
    loaded = Engine.load(tmp_path / "with", dataclasses.replace(settings, draft=flag))
    assert isinstance(loaded.draft_modules[0], ClassicMTP if kind == "classic" else DSpark)
    token_ids = random_ids(9)
    assert torch.equal(loaded.logits(token_ids), skipped.logits(token_ids))


def test_spec11_h51_a_checkpoint_without_speculative_weights_has_none_to_load(
    tmp_path: Path,
) -> None:
    write_synthetic(tmp_path / "without", tiny_config(max_position_embeddings=4096), "bf16", 0)
    settings = EngineConfig(device="cpu", max_context=64)
    assert Engine.load(tmp_path / "without", settings).draft_modules == []
    with pytest.raises(UserError, match="draft module: found none, expected dspark"):
        Engine.load(tmp_path / "without", dataclasses.replace(settings, draft="dspark"))
