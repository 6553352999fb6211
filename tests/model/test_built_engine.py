"""What an engine is built of: the cut of prompts, the table that was checked, whose weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4.engine
from dsv4 import Engine, EngineConfig, ModelConfig, UserError
from dsv4.checkpoint import write_synthetic
from dsv4.checkpoint.identity import Identity
from dsv4.opened_checkpoint import OpenedCheckpoint
from dsv4.ops.tables import TORCH_TABLE, Table
from dsv4.parallel.placement import Placement
from dsv4.plan import MemoryPlan
from dsv4.step.chunks import PromptChunks
from tests.model.tiny import CPU, random_weights, small_config, tiny_engine
from tests.speculative.models import drafted_config, drafted_weights

# Torch's own name of the CPU, which counts as another device.
OTHER = torch.device("cpu", 0)


@pytest.mark.parametrize(
    ("chunk", "expected"), [(None, PromptChunks(512, 2)), (16, PromptChunks(16, 1))]
)
def test_only_chunks_that_nobody_asked_for_are_cut_for_devices_in_turn(
    chunk: int | None, expected: PromptChunks
) -> None:
    config = ModelConfig.from_dict(small_config())
    placement = Placement.of_layers((CPU, CPU, OTHER, OTHER))
    settings = EngineConfig(device="cpu", max_context=64, prefill_chunk=chunk)
    engine = Engine(config, settings, random_weights(config), placement)
    assert engine.prompt_chunks == expected


def test_an_engine_computes_with_the_table_that_its_weights_were_checked_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def checked(*arguments: Any) -> Table:
        given.extend(arguments)
        return TORCH_TABLE

    monkeypatch.setattr(dsv4.engine, "checked_table", checked)
    engine = tiny_engine(max_context=64)
    assert given[0] is not TORCH_TABLE
    assert given[1:] == [engine.model, engine.engine_config]
    assert engine.table is TORCH_TABLE


def test_states_are_of_the_weights_of_the_model_and_of_those_of_the_module() -> None:
    config = drafted_config("dspark")
    settings = EngineConfig(device="cpu", max_context=64, draft="dspark")
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    weights = drafted_weights(config, "dspark")
    identity = Identity("the model", "the module")
    engine = Engine(config, settings, weights, placement, TORCH_TABLE, identity=identity)
    assert engine.key.checkpoint == "the model"
    assert engine.state.draft is not None
    assert engine.state.draft.module.endswith(" of the module")


def test_graphs_of_torch_ops_are_refused() -> None:
    expected = "EngineConfig.cuda_graph: found the torch ops, expected 'cuda'"
    with pytest.raises(UserError, match=expected):
        tiny_engine(max_context=64, cuda_graph="full")


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: MemoryPlan) -> None:
        raise UserError("too large")

    write_synthetic(tmp_path / "model", small_config(), "f32", 0)
    monkeypatch.setattr(MemoryPlan, "refuse_if_too_large", refuse)
    monkeypatch.setattr(OpenedCheckpoint, "reading", None)
    with pytest.raises(UserError, match="too large"):
        Engine.load(tmp_path / "model", EngineConfig(device="cpu", max_context=64))


def test_other_ways_to_share_layers_are_said_only_where_there_are_several_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_synthetic(tmp_path / "model", small_config(), "f32", 0)
    with caplog.at_level("INFO", "dsv4"):
        Engine.load(tmp_path / "model", EngineConfig(device="cpu", max_context=64))
    assert "--parallel" not in caplog.text


def test_keeping_packed_weights_is_told_about(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "model", small_config(), "f32", 0)
    config = EngineConfig(device="cpu", max_context=64, packed_cache=str(tmp_path / "packed"))
    seen: list[tuple[int, int]] = []

    def keeping(done: int, total: int) -> None:
        seen.append((done, total))

    Engine.load(tmp_path / "model", config, keeping=keeping)
    assert seen[-1][0] == seen[-1][1] > 0
    seen.clear()
    Engine.load(tmp_path / "model", config, keeping=keeping)
    assert seen == []


def test_the_op_table_may_be_changed_on_the_way(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "model", small_config(), "f32", 0)
    given: list[Table] = []
    other = replace(TORCH_TABLE)

    def change(table: Table) -> Table:
        given.append(table)
        return other

    config = EngineConfig(device="cpu", max_context=64)
    engine = Engine.load(tmp_path / "model", config, change_table=change)
    assert len(given) == 1
    assert engine.table is other


def test_a_change_that_returns_no_op_table_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "model", small_config(), "f32", 0)

    def forgets(_: Table) -> Any:
        pass

    config = EngineConfig(device="cpu", max_context=64)
    with pytest.raises(UserError, match="^change_table: returned None, expected an op table$"):
        Engine.load(tmp_path / "model", config, change_table=forgets)


@pytest.mark.parametrize("name", ["progress", "compiling", "packing", "keeping", "change_table"])
def test_a_word_for_a_function_is_refused(name: str, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "model", small_config(), "f32", 0)
    config = EngineConfig(device="cpu", max_context=64)
    given: dict[str, Any] = {name: "x"}
    with pytest.raises(UserError, match=f"^{name}: found 'x', expected a function or None$"):
        Engine.load(tmp_path / "model", config, **given)
