"""The load benchmark runs, on a geometry that is small enough to wait for."""

import re
from typing import Literal

import pytest

from dsv4 import plan
from dsv4.bench import load
from dsv4.bench.__main__ import main
from dsv4.bench.load import bench_load
from dsv4.checkpoint import tiny_config
from dsv4.engine_config import EngineConfig


def test_what_the_host_cannot_hold_is_refused_before_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda _: 20 << 30)
    monkeypatch.setattr(load, "synthetic_weights", lambda *_: pytest.fail("drawn"))
    assert main(["load", "--device", "cpu", "--layers", "1"]) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(
        "error: --layers: found 1, which take .* MiB, expected as many as 20,480 MiB hold\n",
        message,
    )


@pytest.mark.slow
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
