"""Placement: contiguous, balanced by bytes, every device used; in turns; or all on every device."""

import re
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.parallel.devices import engine_devices, with_device_defaults
from dsv4.parallel.placement import Placement, bytes_by_layer
from dsv4.weights.parameters import parameters
from tests.ops.cases import tiny_config


def gpus(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def indices(placement: Placement) -> list[int]:
    return [device.index for device in placement.layer_devices]


@given(
    layer_bytes=st.lists(st.integers(1, 10**12), min_size=1, max_size=70), devices=st.integers(1, 8)
)
def test_layers_are_contiguous_and_every_device_is_used(
    layer_bytes: list[int], devices: int
) -> None:
    found = indices(Placement.pipeline(layer_bytes, gpus(devices)))
    assert len(found) == len(layer_bytes)
    assert found == sorted(found)
    assert sorted(set(found)) == list(range(min(devices, len(layer_bytes))))


@given(
    layers=st.integers(8, 70),
    devices=st.integers(1, 8),
    spread=st.integers(0, 10),
    seed=st.randoms(),
)
def test_no_device_holds_more_than_its_share_and_one_layer(
    layers: int, devices: int, spread: int, seed
) -> None:
    layer_bytes = [100 + seed.randint(0, spread) for _ in range(layers)]
    found = indices(Placement.pipeline(layer_bytes, gpus(devices)))
    held = [
        sum(size for size, device in zip(layer_bytes, found, strict=True) if device == d)
        for d in range(devices)
    ]
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


@pytest.mark.parametrize("parallel", ["pipeline", "round-robin"])
@pytest.mark.parametrize("count", range(1, 9))
def test_spec11_j90_every_parameter_has_a_device_for_any_number_of_gpus(
    parallel: str, count: int
) -> None:
    """Layers are placed whole, so no number has to divide anything, nor be one of layers."""
    config = tiny_config()
    engine = EngineConfig(gpus=count, parallel=parallel)  # pyright: ignore[reportArgumentType]
    placement = Placement.of(engine, gpus(count), [1] * config.num_hidden_layers)
    devices = {placement.device_of(name).index for name in parameters(config, mtp="classic")}
    assert devices == set(range(min(count, config.num_hidden_layers)))


def test_embedding_and_head_count_where_they_live() -> None:
    config = tiny_config()
    layers = config.num_hidden_layers
    sizes = [
        (name, 1 if name.startswith("layers.") else 10**6)
        for name in parameters(config, mtp="classic")
    ]
    counted = bytes_by_layer(sizes, layers)
    assert sum(counted) == sum(nbytes for _, nbytes in sizes)
    assert counted[0] // 10**6 == 1
    assert set(counted[1:-1]) < set(range(1000))
    ends = [name for name, nbytes in sizes if nbytes > 1 and name != "embed.weight"]
    assert counted[-1] // 10**6 == len(ends) > 5


def test_embedding_and_head_take_the_place_of_layers() -> None:
    """Pro: 13 GB a layer, 1.85 GB for either end, so of 61 layers the ends get 7."""
    layer_bytes = [1300] * 61
    layer_bytes[0] += 185
    layer_bytes[-1] += 185
    found = indices(Placement.pipeline(layer_bytes, gpus(8)))
    counts = [found.count(device) for device in range(8)]
    assert (counts[0], counts[-1], sorted(counts)) == (7, 7, [7, 7, 7, 8, 8, 8, 8, 8])


@given(layer_bytes=st.lists(st.integers(1, 30), min_size=1, max_size=9), devices=st.integers(1, 4))
@example(layer_bytes=[10, 1, 1, 1, 1], devices=3)
@example(layer_bytes=[1, 5, 2, 3], devices=3)  # The most equal parts have 6 on a device.
def test_the_fullest_device_is_as_empty_as_can_be(layer_bytes: list[int], devices: int) -> None:
    """And of such cuts the parts are as equal as can be."""
    parts = min(devices, len(layer_bytes))

    def largest_and_squares(ends: tuple[int, ...]) -> tuple[int, int]:
        edges = pairwise((0, *ends, len(layer_bytes)))
        held = [sum(layer_bytes[start:end]) for start, end in edges]
        return max(held), sum(nbytes**2 for nbytes in held)

    found = indices(Placement.pipeline(layer_bytes, gpus(devices)))
    ends = tuple(layer for layer in range(1, len(found)) if found[layer] != found[layer - 1])
    cuts = combinations(range(1, len(layer_bytes)), parts - 1)
    assert largest_and_squares(ends) == min(map(largest_and_squares, cuts))


@given(layers=st.integers(1, 70), devices=st.integers(1, 8))
def test_round_robin_takes_turns(layers: int, devices: int) -> None:
    assert indices(Placement.round_robin(layers, gpus(devices))) == [
        layer % devices for layer in range(layers)
    ]


def test_the_engine_config_chooses_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def placed(engine: EngineConfig) -> Placement:
        return Placement.of(engine, engine_devices(engine), [30, 10, 10, 10])

    assert indices(placed(EngineConfig(gpus=2))) == [0, 1, 1, 1]
    assert indices(placed(EngineConfig(gpus=2, parallel="round-robin"))) == [0, 1, 0, 1]
    for parallel in ("pipeline", "round-robin"):
        assert indices(placed(EngineConfig(parallel=parallel))) == [0] * 4


def test_devices_of_an_engine_config_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert engine_devices(EngineConfig()) == (torch.device("cpu"),)
    with pytest.raises(
        UserError, match=r"EngineConfig.gpus: found 2, expected 1 when running on the CPU"
    ):
        engine_devices(EngineConfig(gpus=2))
    with pytest.raises(UserError, match=r"EngineConfig.device='cuda': found no CUDA device"):
        engine_devices(EngineConfig(device="cuda"))


def test_devices_of_an_engine_config_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert engine_devices(EngineConfig()) == (torch.device("cuda", 0),)
    assert engine_devices(EngineConfig(gpus=4)) == tuple(gpus(4))
    assert engine_devices(EngineConfig(device="cpu")) == (torch.device("cpu"),)
    with pytest.raises(UserError, match=r"EngineConfig.gpus: found 5, expected at most 4"):
        engine_devices(EngineConfig(gpus=5))


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_spec11_j90_other_numbers_of_gpus_than_two_four_and_eight_are_refused(count: int) -> None:
    expected = f"gpus: found {count} with EngineConfig.parallel='tensor', expected one of 2, 4, 8$"
    with pytest.raises(UserError, match=expected):
        EngineConfig(gpus=count, parallel="tensor")


def test_every_rank_has_all_layers() -> None:
    """On devices of their own or together; and rank 0 keeps what is not computed with."""
    engine = EngineConfig(gpus=2, parallel="tensor")
    for devices in (gpus(2), [torch.device("cpu")] * 2):
        placement = Placement.of(engine, devices, [1] * 4)
        assert (len(placement.stages), placement.ranks) == (1, 2)
        for rank, device in enumerate(devices):
            assert placement.of_rank(rank).layer_devices == (device,) * 4
        for name in parameters(tiny_config(), mtp="classic"):
            assert placement.devices_of(name) == tuple(devices)
        with pytest.raises(ValueError, match="found 2 ranks, expected the placement of one"):
            placement.device_of("head.weight")


def test_a_stage_is_a_run_of_layers_on_one_device() -> None:
    first, second = gpus(2)
    placement = Placement.of_layers([first, first, second, first])
    assert [stage.layers for stage in placement.stages] == [(0, 1), (2,), (3,)]
    assert placement.devices == (first, second)
    assert (placement.ranks_on(first), placement.ranks_on(second)) == (1, 1)
    assert placement.of_rank(0) == placement
    for name in parameters(tiny_config()):
        assert placement.devices_of(name) == (placement.device_of(name),)


class _Gpu:
    """What CUDA says of a GPU."""

    def __init__(self, name: str, major: int, multi_processor_count: int) -> None:
        self.name = name
        self.major = major
        self.minor = 0
        self.multi_processor_count = multi_processor_count


@pytest.mark.parametrize(
    "other", [_Gpu("NVIDIA Y", 9, 132), _Gpu("NVIDIA X", 10, 132), _Gpu("NVIDIA X", 9, 114)]
)
def test_gpus_that_differ_share_no_layer(other: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [_Gpu("NVIDIA X", 9, 132), other]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    assert engine_devices(EngineConfig(gpus=2)) == tuple(gpus(2))
    tensor = EngineConfig(gpus=2, parallel="tensor")
    expected = (
        f"EngineConfig.parallel='tensor': found cuda:1 ({other.name}, compute capability "
        f"{other.major}.0, {other.multi_processor_count} multiprocessors) beside cuda:0 (NVIDIA X, "
        "compute capability 9.0, 132 multiprocessors), expected GPUs of one kind"
    )
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        engine_devices(tensor)
    assert engine_devices(tensor, absent=True) == tuple(gpus(2))
    found[1] = found[0]
    assert engine_devices(tensor) == tuple(gpus(2))


def test_the_chunk_of_a_prompt_follows_the_devices() -> None:
    one, *others = gpus(2)

    def chunk(engine: EngineConfig, *devices: torch.device) -> int | None:
        return with_device_defaults(engine, devices).prefill_chunk

    assert chunk(EngineConfig(), one, one) == 4096
    assert chunk(EngineConfig(), one, one, *others) == 2048
    assert chunk(EngineConfig(gpus=2, parallel="tensor"), one, *others) == 8192
    assert chunk(EngineConfig(prefill_chunk=7), one) == 7
    assert chunk(EngineConfig(), torch.device("cpu")) == 512
