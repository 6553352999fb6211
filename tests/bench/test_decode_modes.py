"""Decode measurements without a GPU: the eager mode, the statistics, and caches that stand for a
long context.
"""

import time

import pytest
import torch

from dsv4.bench.decode_modes import (
    DecodeModes,
    against_floor,
    fill_caches,
    summary,
    token_milliseconds,
)
from dsv4.bench.geometry import placement_record
from dsv4.bench.geometry_bytes import stored_bytes
from dsv4.caches.rows import RowFormat
from dsv4.checkpoint import geometry_config
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.parallel.placement import Placement, bytes_by_layer
from dsv4.weights.parameters import parameters
from tests.model.tiny import tiny_engine

DEVICES = tuple(torch.device("cuda", index) for index in range(8))


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(kv_dtype="fp8")


def test_times_are_from_token_to_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 1.75])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert token_milliseconds(iter([4, 5, 6])) == [500.0, 250.0]


def test_summary_is_not_moved_by_one_slow_token() -> None:
    measured = summary([2.0] * 99 + [102.0])
    assert measured == {"ms_per_token": 2.0, "ms_per_token_mean": 3.0, "ms_per_token_p90": 2.0}


def test_floor_is_all_bytes_at_the_copy_rate() -> None:
    measured = against_floor({"ms_per_token": 4.0}, nbytes=8_000_000_000, bytes_per_second=4e12)
    assert measured == {"ms_per_token": 4.0, "weight_gb_per_s": 2000.0, "times_the_floor": 2.0}


def test_eager_mode_decodes_from_the_position(engine: Engine) -> None:
    fill_caches(engine.state)
    measured = DecodeModes(engine, ("eager",)).measure(position=300, tokens=10)
    assert measured["eager"]["ms_per_token"] > 0
    assert engine.position == 300 + 10 + 8


def test_graph_modes_need_the_cuda_ops(engine: Engine) -> None:
    with pytest.raises(UserError, match=r"^--modes: found 'split' with the torch ops"):
        DecodeModes(engine, ("eager", "split"))


def test_filled_caches_are_finite_rows_of_spread_one(engine: Engine) -> None:
    fill_caches(engine.state)
    formats = set()
    for layer in engine.state.layers:
        caches = [
            layer.keys.ring,
            *(part.rows for part in (layer.compressed, layer.index) if part is not None),
        ]
        for cache in caches:
            rows = cache.read_all()
            assert torch.isfinite(rows).all()
            assert 0.8 < rows.std() < 1.2
            formats.add(cache.format)
    assert formats == {RowFormat.KV_FP8, RowFormat.INDEX_FP8}


def test_longer_contexts_do_not_change_what_short_ones_see(engine: Engine) -> None:
    ids = list(range(40))
    fresh = engine.logits(ids)
    fill_caches(engine.state)
    assert torch.equal(engine.logits(ids), fresh)


@pytest.mark.parametrize(("geometry", "layers"), [("v4-pro", 61), ("v4-flash", 43)])
def test_benchmark_places_layers_by_their_bytes(geometry: str, layers: int) -> None:
    config = ModelConfig.from_dict(geometry_config(geometry))  # type: ignore[arg-type]
    sizes = [
        (name, stored_bytes(parameter, "nvfp4-experts"))
        for name, parameter in parameters(config).items()
    ]
    devices = Placement.pipeline(bytes_by_layer(sizes, layers), DEVICES).layer_devices
    record = placement_record("pipeline", devices)
    assert record["hops"] == 7
    assert sum(record["layers"].values()) == layers
    assert max(record["layers"].values()) - min(record["layers"].values()) <= 2


def test_round_robin_changes_device_at_every_layer() -> None:
    record = placement_record("round-robin", Placement.round_robin(20, DEVICES).layer_devices)
    assert (record["hops"], record["layers"]["cuda:0"], record["layers"]["cuda:7"]) == (19, 3, 2)
