"""What an engine is built of: the cut of prompts, the table that was checked, whose weights."""

from typing import Any

import pytest
import torch

import dsv4.engine
from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.checkpoint.identity import Identity
from dsv4.ops.tables import TORCH_TABLE, Table
from dsv4.parallel.placement import Placement
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
