"""Memory that is available, and GPUs that have none."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.plan import available_bytes


def test_available_bytes_of_the_cpu_come_from_the_operating_system() -> None:
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    total = (
        int(next(line for line in meminfo.splitlines() if line.startswith("MemTotal:")).split()[1])
        * 1024
    )
    assert 0 < available_bytes(torch.device("cpu")) <= total


def test_memory_is_stated_in_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "MemTotal: 90 kB\nMemAvailable:   7 kB\n")
    assert available_bytes(torch.device("cpu")) == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda _: "MemTotal: 90 kB\n")
    with pytest.raises(OSError, match=r"^/proc/meminfo has no MemAvailable line$"):
        available_bytes(torch.device("cpu"))


def test_gpu_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(device: torch.device) -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    with pytest.raises(UserError, match=r"^cuda:1: cannot be used \(CUDA error: out of memory\)$"):
        available_bytes(torch.device("cuda", 1))


def test_a_full_gpu_is_named_before_its_driver_is_asked_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(device: torch.device) -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: out of memory")

    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(UserError, match=r"^cuda:0: cannot be used \(CUDA error: out of memory\)$"):
        Engine.plan(CHECKPOINT, EngineConfig(device="cuda"))
