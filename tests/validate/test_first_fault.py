"""What ``--against`` says of a fault besides the first value under the threshold."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.validate.cosine import main
from tests.validate.trace_files import random, write


def values() -> dict[str, Tensor]:
    return {
        "layers.1.router.experts": torch.tensor([[1, 2, 3]] * 6),
        "layers.1.router.weights": random(6, 3),
        "layers.1.streams": random(6, 4, 16, seed=1),
        "hidden": random(6, 16, seed=2),
    }


def compare(folder: Path, theirs: dict[str, Tensor], *options: str) -> int:
    ours = write(folder / "ours.safetensors", values())
    other = write(folder / "theirs.safetensors", theirs)
    return main(["--trace", str(ours), "--against", str(other), *options])


def test_a_fault_in_most_tokens_is_named_behind_a_near_tie(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = values()
    other["layers.1.router.experts"][2] += 9
    other["layers.1.streams"][3:] += 9
    other["hidden"][1:] += 9
    json_file = tmp_path / "out.json"
    assert compare(tmp_path, other, "--json", str(json_file)) == 1
    out = capsys.readouterr().out
    tie = "first under the threshold: layers.1.router.experts, token 2"
    assert out.endswith(f"\nfirst in most of its rows: hidden, 5 of 6\n{tie}\n")
    assert "under the threshold from 3: 3 of 6\n" in out
    counts = {row["name"]: row["under"] for row in json.loads(json_file.read_text())["rows"]}
    assert counts == dict(zip(values(), (1, 0, 3, 5), strict=True))


@pytest.mark.parametrize(("factor", "found"), [(1.5, "0.6667"), (-1.0, "-1")])
def test_a_factor_is_named(
    factor: float, found: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = values()
    other["layers.1.router.weights"] *= factor
    assert compare(tmp_path, other) == 1
    said = f"layers.1.router.weights: ours is {found} times theirs\n"
    first = "first under the threshold: layers.1.router.weights, token 0\n"
    assert capsys.readouterr().out.endswith(said + first)
