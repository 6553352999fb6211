"""The demo at the end of 2^20 tokens, behind drawn caches: kernels against the torch ops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.bench.decode_modes import fill_caches
from dsv4.caches.point import Point
from dsv4.decode import CUDAGraphDecoder
from dsv4.demo import CHECKPOINT
from dsv4.demo.training.needles import longer_copy
from dsv4.errors import UserError
from dsv4.sampling import Sampler
from dsv4.step.steps import RecordedSteps

pytestmark = pytest.mark.gpu

CONTEXT = 1 << 20
# One prefill step across a window of every compressor, then decode steps to the last position.
PREFILLED = 300
DECODED = 12
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return longer_copy(CHECKPOINT, CONTEXT, tmp_path_factory.mktemp("demo"))


def engine(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(device="cuda", max_context=CONTEXT, prefill_chunk=512, **settings)
    made = Engine.load(folder, config)
    fill_caches(made.state)
    return made


def last_logits(engine: Engine) -> Tensor:
    """Of the last prefilled token and of every decoded one; the last of them has position 2^20 −
    1.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 2000, (PREFILLED + DECODED,), generator=generator).tolist()
    engine.state.set_position(CONTEXT - len(ids))
    rows = [engine.prefill(ids[:PREFILLED])]
    rows += [engine.decode([token])[0] for token in ids[PREFILLED:]]
    assert engine.position == CONTEXT
    return torch.stack(rows).double()


@pytest.fixture(scope="module")
def on_kernels(folder: Path) -> Engine:
    return engine(folder)


def test_kernels_are_as_exact_as_the_torch_ops(folder: Path, on_kernels: Engine) -> None:
    """Twice the distance from float32 that the torch ops in bfloat16 have: roundings send some
    tokens to another expert, or other entries into a list.
    """
    exact = last_logits(engine(folder, ops="torch", compute_dtype="float32"))
    rounded = last_logits(engine(folder, ops="torch"))
    found = last_logits(on_kernels)
    error, allowed = ((logits - exact).norm() / exact.norm() for logits in (found, rounded))
    print(f"\nkernels {float(error):.4f}, torch ops in bfloat16 {float(allowed):.4f}")
    assert float(error) <= 2 * float(allowed) + 2**-8
    with pytest.raises(UserError, match=r"max_context: found a sequence of 1048577 tokens"):
        on_kernels.decode([5])


def test_captured_steps_end_at_the_last_position(on_kernels: Engine) -> None:
    steps = on_kernels.steps
    assert isinstance(steps, RecordedSteps)
    on_kernels.state.set_position(0)
    captured = CUDAGraphDecoder(steps, "full", CONTEXT)
    last_logits(on_kernels)
    state = on_kernels.state
    before = Point.of(state.layers, state.draft, state.position, state.furthest)
    found = []
    for decoder in (None, captured):
        before.restore(state.layers, state.draft)
        state.set_position(CONTEXT - 8)
        found.append(list(on_kernels.following(7, Sampler(GREEDY), 8, decoder)))
        assert on_kernels.position == CONTEXT
    assert len(found[0]) == 8
    assert found[0] == found[1]
