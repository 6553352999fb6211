"""The load benchmark runs, on a geometry that is small enough to wait for."""

from typing import Literal

import pytest

from dsv4.bench.load import bench_load
from dsv4.checkpoint import tiny_config
from dsv4.engine_config import EngineConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_everything_is_measured_as_often_as_asked(device: Literal["cpu", "cuda"]) -> None:
    engine = EngineConfig(device=device)
    lines: list[str] = []
    result = bench_load(tiny_config(), "nvfp4-experts", [engine, engine], 1, True, lines.append)
    assert len(lines) == 5
    assert result["layers"] == 4
    first, again = result["placements"]
    for found in (first, again):
        assert (found["gpus"], found["parallel"]) == (1, "pipeline")
        for name in ("warm_gb_per_s", "load_and_pack_seconds", "packed_cache_seconds"):
            assert len(found[name]) == 1
            assert found[name][0] > 0
        assert found["warm_gb_per_s_of_bytes_alone"][0] >= found["warm_gb_per_s"][0]
        assert found["warm_share_of_ceiling"] > 0
        assert found["cold_gb_per_s"] > 0
        assert found["packed_cache_gigabytes"] > 0
    for name in ("first_start", "start_from_packed_cache", "start_with_packing"):
        seconds = first[name]
        assert 0 < seconds["imported"] < seconds["loaded"] < seconds["first_token"]
    assert first["pack_and_write_cache_seconds"] > 0
    assert "pack_and_write_cache_seconds" not in again, "they share an entry"
