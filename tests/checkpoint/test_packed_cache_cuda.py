"""Packed weights on disk, in the layouts of the CUDA ops on GPUs: on one, in a pipeline, and as
parts of ranks on two.
"""

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.checkpoint.packed_cache import MANIFEST
from dsv4.demo import CHECKPOINT
from tests.source_rules import ROOT

pytestmark = pytest.mark.gpu

PROMPT = list(range(40))
Placed = tuple[int, str]
PLACED: list[Placed] = [(1, "pipeline"), (2, "pipeline"), (2, "tensor")]
START = """
import sys
from tests.checkpoint.test_packed_cache_cuda import logits
{before}
print(logits(sys.argv[1], (int(sys.argv[2]), sys.argv[3])).tolist())
"""
KILLED = """
import os, signal
from pathlib import Path
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=PLACED, ids=lambda one: f"{one[0]}_{one[1]}")
def placed(request: pytest.FixtureRequest) -> Placed:
    """GPUs and how the layers lie on them."""
    if torch.cuda.device_count() < request.param[0]:
        pytest.skip("needs two GPUs")
    return request.param


@pytest.fixture(autouse=True)
def notes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dsv4")


def logits(cache: str | Path, placed: Placed) -> torch.Tensor:
    gpus, parallel = placed
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


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def was_read(caplog: pytest.LogCaptureFixture) -> bool:
    found = any("nothing is packed" in record.getMessage() for record in caplog.records)
    caplog.clear()
    return found


def process(cache: Path, placed: Placed, before: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", START.format(before=before), str(cache), *map(str, placed)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_second_start_computes_the_same(
    tmp_path: Path, placed: Placed, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(tmp_path, placed)
    assert not was_read(caplog)
    assert torch.equal(logits(tmp_path, placed), expected)
    assert was_read(caplog)


def test_a_pipeline_reads_what_one_gpu_wrote_and_ranks_have_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = logits(tmp_path, (1, "pipeline"))
    caplog.clear()
    assert torch.equal(logits(tmp_path, (2, "pipeline")), expected)
    assert was_read(caplog)
    logits(tmp_path, (2, "tensor"))
    assert not was_read(caplog)
    assert len(entries(tmp_path)) == 2


def test_a_bit_is_missed_on_whatever_gpu_it_lies_and_mended(
    tmp_path: Path, placed: Placed, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the first weight, and one of the last, which is the last GPU's or the last rank's."""
    expected = logits(tmp_path, placed)
    (entry,) = entries(tmp_path)
    packed = json.loads((entry / MANIFEST).read_text())["packed"]
    last = str(len(packed["checksums"]) - 1)
    for name in ("0", last):
        caplog.clear()
        flip_a_bit(entry, name)
        assert torch.equal(logits(tmp_path, placed), expected)
        assert f"tensor {name}: damaged: found checksum" in caplog.text
        assert not was_read(caplog)
    assert torch.equal(logits(tmp_path, placed), expected)
    assert was_read(caplog)


def flip_a_bit(entry: Path, name: str) -> None:
    with (entry / "model.safetensors").open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + (begin + end) // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))


@pytest.mark.slow
def test_a_killed_process_leaves_no_entry_and_two_at_once_leave_one(
    tmp_path: Path, placed: Placed, caplog: pytest.LogCaptureFixture
) -> None:
    killed = process(tmp_path, placed, KILLED)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    (left,) = entries(tmp_path)
    assert left.name.startswith(".")
    assert (left / MANIFEST).exists()
    running = [process(tmp_path, placed) for _ in range(2)]
    answers = [one.communicate()[0] for one in running]
    assert [one.returncode for one in running] == [0, 0]
    (entry,) = entries(tmp_path)
    assert entry != left
    found = logits(tmp_path, placed)
    assert was_read(caplog)
    assert [json.loads(answer) for answer in answers] == [found.tolist()] * 2
