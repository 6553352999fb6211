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
    result = bench_load(tiny_config(), "nvfp4-experts", engine, 1, True, lines.append)
    assert len(lines) == 3
    assert (result["layers"], result["gpus"], result["parallel"]) == (4, 1, "pipeline")
    for name in ("warm_gb_per_s", "load_and_pack_seconds", "packed_cache_seconds"):
        assert len(result[name]) == 1
        assert result[name][0] > 0
    assert result["cold_gb_per_s"] > 0
    assert result["packed_cache_gigabytes"] > 0
    for name in ("first_start", "start_from_packed_cache", "start_with_packing"):
        seconds = result[name]
        assert 0 < seconds["imported"] < seconds["loaded"] < seconds["first_token"]
