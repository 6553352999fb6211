"""Dense steps on a GPU: the same bits as with the indexer's choice, in the shapes of Flash."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.bench.decode_modes import fill_caches
from dsv4.checkpoint import geometry_config, synthetic_weights
from dsv4.decode import CUDAGraphDecoder
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from dsv4.step.captured import Mode
from dsv4.step.lock_step import AnyStep
from dsv4.step.steps import RecordedSteps

pytestmark = pytest.mark.gpu

CONTEXT = 4096
# Entries of 2,051 tokens are all chosen: 512 of 4 tokens, and the three behind them.
DENSE_UNTIL = 2051


@pytest.fixture(scope="module", params=["fp8", "bf16"])
def engine(request: pytest.FixtureRequest) -> Engine:
    raw = {**geometry_config("v4-flash", 4), "n_routed_experts": 32}
    config = ModelConfig.from_dict(raw)
    device = torch.device("cuda", 0)
    weights = synthetic_weights(config, "nvfp4-experts", 0, lambda _: device)
    settings = EngineConfig(
        device="cuda", max_context=CONTEXT, prefill_chunk=512, kv_dtype=request.param
    )
    found = Engine(config, settings, weights, Placement.of_layers([device] * 4), CUDA_TABLE)
    fill_caches(found.state)
    return found


@pytest.fixture(scope="module")
def steps(engine: Engine) -> RecordedSteps:
    assert isinstance(engine.steps, RecordedSteps)
    return engine.steps


def run(steps: RecordedSteps, step: AnyStep, position: int, end: int | None) -> Tensor:
    """The logits of a step at ``position``, in memory that held NaN before."""
    assert step.feed is not None
    for memory in steps.ranks[0].memory.values():
        memory.bytes.fill_(0xFF)
    steps.state.set_position(position)
    step.feed.put([7 + token for token in range(step.tokens)])
    step.run(step.tokens, end)
    return step.logits_TV.clone()


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@torch.inference_mode()
def test_a_dense_step_has_the_bits_of_the_others(steps: RecordedSteps, tokens: int) -> None:
    step = steps.step(tokens)
    assert step.recorded.dense_until == DENSE_UNTIL
    for position in (0, 3, 120, 126, 127, 1024, DENSE_UNTIL - tokens):
        dense = run(steps, step, position, position + tokens)
        assert torch.equal(dense, run(steps, step, position, None)), position
        assert not dense.isnan().any()


@pytest.mark.parametrize("mode", get_args(Mode))
@torch.inference_mode()
def test_replays_go_on_where_there_is_a_choice(steps: RecordedSteps, mode: Mode) -> None:
    """One token behind the other over the border, as always with the choice."""
    decoder = CUDAGraphDecoder(steps, mode, CONTEXT)
    steps.state.set_position(DENSE_UNTIL - 3)
    found = [decoder.replay(token, DENSE_UNTIL - 3 + token).clone() for token in range(6)]
    step = steps.step(1)
    assert step.feed is not None
    steps.state.set_position(DENSE_UNTIL - 3)
    for token, logits_TV in enumerate(found):
        step.feed.put([token])
        step.run(1)
        assert torch.equal(logits_TV, step.logits_TV), token
