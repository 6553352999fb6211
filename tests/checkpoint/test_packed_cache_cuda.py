"""Packed weights on disk, in the layouts of the CUDA ops on GPUs."""

import logging
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.demo import CHECKPOINT

pytestmark = pytest.mark.gpu

PROMPT = list(range(40))


def logits(cache: Path, gpus: int = 1, parallel: str = "pipeline") -> torch.Tensor:
    config = EngineConfig(
        device="cuda",
        ops="cuda",
        gpus=gpus,
        parallel=parallel,  # pyright: ignore[reportArgumentType]
        max_context=64,
        cuda_graph="full",
        packed_cache=str(cache),
    )
    engine = Engine.load(CHECKPOINT, config)
    return torch.stack([engine.prefill(PROMPT), *engine.decode([7])]).cpu()


def entries(cache: Path) -> int:
    return sum(path.is_dir() for path in cache.iterdir())


def was_read(caplog: pytest.LogCaptureFixture) -> bool:
    found = any("nothing is packed" in record.getMessage() for record in caplog.records)
    caplog.clear()
    return found


def test_a_second_start_computes_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dsv4")
    expected = logits(tmp_path)
    assert not was_read(caplog)
    assert torch.equal(logits(tmp_path), expected)
    assert was_read(caplog)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pipelines_share_an_entry_and_ranks_have_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dsv4")
    expected = logits(tmp_path)
    caplog.clear()
    assert torch.equal(logits(tmp_path, gpus=2), expected)
    assert was_read(caplog)
    of_ranks = logits(tmp_path, 2, "tensor")
    assert not was_read(caplog)
    assert entries(tmp_path) == 2
    assert torch.equal(logits(tmp_path, 2, "tensor"), of_ranks)
    assert was_read(caplog)
