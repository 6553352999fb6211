"""The memory plan against what a GPU gives away: within 5 % for slices of Flash and the demo."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.checkpoint import geometry_config, write_synthetic
from dsv4.demo import CHECKPOINT
from dsv4.plan import CUDA_RESERVE_BYTES

pytestmark = pytest.mark.gpu


def flash_slice(folder: Path) -> Path:
    """Four layers of Flash, every kind, with 64 of its experts and all of the vocabulary."""
    write_synthetic(
        folder, {**geometry_config("v4-flash", 4), "n_routed_experts": 64}, "nvfp4-experts", 0
    )
    return folder


@pytest.mark.parametrize("checkpoint", [flash_slice, lambda _: CHECKPOINT], ids=["flash", "demo"])
@pytest.mark.parametrize("chunk", [512, 2048])
def test_the_peak_of_loading_and_running_is_what_was_planned(
    tmp_path: Path, checkpoint: Callable[[Path], Path], chunk: int
) -> None:
    """Bytes that torch hands out: weights, packing, state and workspace; the driver's reserve is
    not among them.
    """
    folder = checkpoint(tmp_path / "x")
    config = EngineConfig(device="cuda", prefill_chunk=chunk, max_context=4096)
    (planned,) = Engine.plan(folder, config).devices
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = Engine.load(folder, config)
    list(engine.generate([5] * (chunk + 100), 8))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    expected = planned.total_bytes - CUDA_RESERVE_BYTES
    print(f"\npeak {peak / 1e6:.1f} MB, planned {expected / 1e6:.1f} MB")
    # The state, which comes behind packing, is planned beside it.
    assert -0.05 * peak <= expected - peak <= 0.05 * peak + planned.state_bytes


def test_no_more_is_reserved_than_was_planned(tmp_path: Path) -> None:
    """Torch's own blocks between those in use included."""
    folder = flash_slice(tmp_path / "x")
    torch.cuda.empty_cache()
    config = EngineConfig(device="cuda", prefill_chunk=1024, max_context=1 << 15)
    (planned,) = Engine.plan(folder, config).devices
    before = torch.cuda.memory_reserved()
    engine = Engine.load(folder, config)
    list(engine.generate([5] * 5000, 8))
    torch.cuda.synchronize()
    used = torch.cuda.memory_reserved() - before
    print(f"\nreserved {used >> 20} MiB, planned {planned.total_bytes >> 20} MiB")
    assert used <= planned.total_bytes
