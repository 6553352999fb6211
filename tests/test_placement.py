"""Pipeline placement: contiguous, balanced, every device used."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import EngineConfig
from dsv4.errors import UserError
from dsv4.parameters import parameters
from dsv4.placement import Placement, engine_devices
from tests.ops.cases import tiny_config


def gpus(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def indices(placement: Placement) -> list[int]:
    return [device.index for device in placement.layer_devices]


@given(layer_bytes=st.lists(st.integers(1, 10**12), min_size=1, max_size=70), devices=st.integers(1, 8))
def test_layers_are_contiguous_and_every_device_is_used(layer_bytes: list[int], devices: int) -> None:
    found = indices(Placement.pipeline(layer_bytes, gpus(devices)))
    assert len(found) == len(layer_bytes)
    assert found == sorted(found)
    assert sorted(set(found)) == list(range(min(devices, len(layer_bytes))))


@given(layers=st.integers(8, 70), devices=st.integers(1, 8), spread=st.integers(0, 10), seed=st.randoms())
def test_no_device_holds_more_than_its_share_and_one_layer(layers: int, devices: int, spread: int, seed) -> None:
    layer_bytes = [100 + seed.randint(0, spread) for _ in range(layers)]
    found = indices(Placement.pipeline(layer_bytes, gpus(devices)))
    held = [sum(size for size, device in zip(layer_bytes, found, strict=True) if device == d) for d in range(devices)]
    assert max(held) <= sum(layer_bytes) / devices + max(layer_bytes)


def test_sixty_one_layers_on_eight_gpus() -> None:
    """Pro: seven hops a token, 7 or 8 layers per GPU."""
    found = indices(Placement.pipeline([13 * 10**9] * 61, gpus(8)))
    assert sum(a != b for a, b in pairwise(found)) == 7
    assert {found.count(device) for device in range(8)} == {7, 8}


def test_one_heavy_layer_gets_its_own_device() -> None:
    assert indices(Placement.pipeline([1, 1, 100, 1, 1], gpus(3))) == [0, 0, 1, 2, 2]
    assert indices(Placement.pipeline([100, 1, 1], gpus(3))) == [0, 1, 2]
    assert indices(Placement.pipeline([1, 1, 100], gpus(3))) == [0, 1, 2]


def test_one_device_owns_everything() -> None:
    cpu = torch.device("cpu")
    placement = Placement.pipeline([5, 6, 7, 8], [cpu])
    assert placement.layer_devices == (cpu,) * 4
    assert {placement.device_of(name) for name in parameters(tiny_config())} == {cpu}


def test_parameters_live_with_their_layer_and_the_ends_with_the_ends() -> None:
    placement = Placement.pipeline([1] * 4, gpus(2))
    for name in parameters(tiny_config(), mtp="classic"):
        index = placement.device_of(name).index
        if name.startswith("layers."):
            assert index == int(name.split(".")[1]) // 2, name
        else:
            assert index == (0 if name == "embed.weight" else 1), name
    assert placement.device_of("layers.2.ffn.experts.w1.weight").index == 1


def test_devices_of_an_engine_config_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert engine_devices(EngineConfig()) == (torch.device("cpu"),)
    with pytest.raises(UserError, match=r"--gpus: found 2, expected 1 when running on the CPU"):
        engine_devices(EngineConfig(gpus=2))
    with pytest.raises(UserError, match=r"--gpus: found 1, expected at most 0"):
        engine_devices(EngineConfig(device="cuda"))


def test_devices_of_an_engine_config_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert engine_devices(EngineConfig()) == (torch.device("cuda", 0),)
    assert engine_devices(EngineConfig(gpus=4)) == tuple(gpus(4))
    assert engine_devices(EngineConfig(device="cpu")) == (torch.device("cpu"),)
    with pytest.raises(UserError, match=r"--gpus: found 8, expected at most 4"):
        engine_devices(EngineConfig(gpus=8))


def test_tensor_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UserError, match="--parallel: found 'tensor'"):
        engine_devices(EngineConfig(gpus=2, parallel="tensor"))
