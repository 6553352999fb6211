"""Memory that GPUs share, with a driver that only writes down what it is asked for."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.errors import UserError
from dsv4.launch import loading
from dsv4.parallel import peer_memory
from dsv4.parallel.peer_memory import allow_peer_access, reach_each_other, shared_memory

RESULTS = loading.driver().CUresult
GPUS = [torch.device("cuda", index) for index in (1, 3)]


class Driver:
    """Notes who may access whom and what is freed; ``error`` is what it answers."""

    CUresult = RESULTS

    def __init__(self) -> None:
        self.error = RESULTS.CUDA_SUCCESS
        self.allowed: list[tuple[str, str]] = []
        self.asked: list[int] = []
        self.freed: list[int] = []
        self._current = ""

    def cuDevicePrimaryCtxRetain(self, index: int) -> tuple[Any, str]:
        return RESULTS.CUDA_SUCCESS, f"context {index}"

    def cuCtxSetCurrent(self, context: str) -> None:
        self._current = context

    def cuCtxEnablePeerAccess(self, context: str, flags: int) -> tuple[Any]:
        assert flags == 0
        self.allowed.append((self._current, context))
        return (self.error,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, int]:
        self.asked.append(nbytes)
        return self.error, 512

    def cuMemFree(self, address: int) -> None:
        self.freed.append(address)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    @contextmanager
    def current(_: torch.device) -> Iterator[None]:
        yield

    made = Driver()
    monkeypatch.setattr(peer_memory, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "device", current)
    return made


def test_each_of_the_gpus_reaches_the_others(driver: Driver) -> None:
    """Also where it did before."""
    for error in (RESULTS.CUDA_SUCCESS, RESULTS.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
        driver.error = error
        driver.allowed.clear()
        assert reach_each_other(GPUS)
        assert driver.allowed == [("context 1", "context 3"), ("context 3", "context 1")]


def test_gpus_that_the_driver_keeps_apart_are_named(driver: Driver) -> None:
    driver.error = RESULTS.CUDA_ERROR_TOO_MANY_PEERS
    expected = "found CUDA_ERROR_TOO_MANY_PEERS for access from cuda:1 to cuda:3, expected GPUs"
    with pytest.raises(UserError, match=expected):
        allow_peer_access(GPUS)
    assert not reach_each_other(GPUS)


@pytest.mark.filterwarnings("error")
def test_memory_that_is_not_to_be_had_is_one_error_and_nothing_is_freed(driver: Driver) -> None:
    driver.error = RESULTS.CUDA_ERROR_OUT_OF_MEMORY
    expected = "^exchange on cuda:1: found CUDA_ERROR_OUT_OF_MEMORY for 48 bytes$"
    with pytest.raises(RuntimeError, match=expected):
        shared_memory((2, 3), torch.int64, GPUS[0])
    gc.collect()
    assert driver.freed == []


def test_memory_is_freed_with_its_tensor(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.ones(48, dtype=torch.uint8)
    memories = []

    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        memories.append(memory)
        return held

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    found = shared_memory((2, 3), torch.int64, GPUS[0])
    assert (found.shape, found.dtype, found.tolist()) == ((2, 3), torch.int64, [[0] * 3] * 2)
    interface = memories[0].__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((48,), (512, False))
    assert (driver.asked, driver.freed) == ([48], [])
    memories.clear()
    assert driver.freed == [512]
