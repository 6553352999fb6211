"""The engine benchmark on a GPU: every mode is measured, and what it says is consistent."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4.bench.__main__ import main
from dsv4.bench.plot import engine_svg

pytestmark = pytest.mark.gpu


def run(out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["engine", *arguments, "--decode-tokens", "12", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_checkpoint_is_measured_in_every_mode(tmp_path: Path) -> None:
    arguments = ("--device", "cuda", "--prompt-tokens", "64", "--repeats", "1")
    result = run(tmp_path / "demo.json", *arguments)["result"]
    assert list(result["decode"]) == ["eager", "split", "full"]
    assert all(mode["ms_per_token"] > 0 for mode in result["decode"].values())


def test_geometry_is_measured_far_behind_its_prompts(tmp_path: Path) -> None:
    arguments = (
        "--geometry",
        "v4-flash",
        "--layers",
        "4",
        "--prompts",
        "64",
        "--positions",
        "200",
        "131072",
    )
    record = run(tmp_path / "flash.json", *arguments, "--modes", "split", "full", "--profile")
    result = record["result"]
    for at in result["decode"].values():
        assert all(
            at[mode]["ms_per_token"] > 0 and at[mode]["times_the_floor"] > 0
            for mode in ("split", "full")
        )
        assert set(at["us_per_layer"]) == {"SWA hash", "CSA hash", "HCA"}
        assert sum(at["us_per_layer"].values()) < 1e3 * at["full"]["ms_per_token"]
    assert set(result["workspace_bytes"]) == {"1", "4096"}
    assert all(by["cuda:0"] > 0 for by in result["workspace_bytes"].values())
    assert result["placement"] == {"parallel": "pipeline", "layers": {"cuda:0": 4}, "hops": 0}
    for profile in result["profile"].values():
        assert (
            set(profile["us_per_layer"]) == set(profile["layer_sequences"]) == {"SWA", "CSA", "HCA"}
        )
    assert "floor" in engine_svg(record)
