"""The load benchmark runs, on a geometry that is small enough to wait for."""

from typing import Literal

import pytest

from dsv4.bench.load import bench_load
from dsv4.checkpoint import tiny_config
from dsv4.engine_config import EngineConfig


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rates_of_a_cold_and_some_warm_loads(device: Literal["cpu", "cuda"]) -> None:
    result = bench_load(tiny_config(), "nvfp4-experts", EngineConfig(device=device), repeats=2)
    assert len(result["warm_gb_per_s"]) == 2
    assert (result["layers"], result["gpus"], result["parallel"]) == (4, 1, "pipeline")
