"""What ``--against`` says of a fault besides the first value under the threshold, and of values
that another engine keeps in another way.
"""

import json
from collections.abc import Callable
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


@pytest.mark.parametrize("change", [lambda x: x.flatten(1), lambda x: x.movedim(0, -1)])
def test_a_value_in_another_layout_is_to_be_changed_where_it_is_written(
    change: Callable[[Tensor], Tensor], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = values()
    other["layers.1.streams"] = change(other["layers.1.streams"]).contiguous()
    assert compare(tmp_path, other) == 2
    shapes = f"found {[*other['layers.1.streams'].shape]}, expected [6, 4, 16] as in"
    hint = "transpose or reshape it where it is written"
    said = f"layers.1.streams: {shapes} ours.safetensors; {hint}\n"
    assert capsys.readouterr().err.endswith(said)


def test_names_of_another_engine_are_told_from_those_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert compare(tmp_path, {"model.layers.1.q": random(6, 3), "z": random(6, 3)}) == 2
    said = "'model.layers.1.q' but no name as 'layers.1.router.experts' (docs/traces.md)\n"
    assert capsys.readouterr().err.endswith(f"found no value that both traces have, {said}")


def test_a_value_that_every_rank_has_gathered_needs_another_join(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    heads = {"layers.1.attn.q": random(6, 4, 8)}
    ours = write(tmp_path / "ours.safetensors", heads)
    ranks = [
        write(tmp_path / f"{rank}.safetensors", heads, rank=rank, ranks=2) for rank in range(2)
    ]
    assert main(["--trace", str(ours), "--against", *map(str, ranks)]) == 2
    said = "layers.1.attn.q: found [6, 8, 8] (join: concat:1), expected [6, 4, 8] as in ours"
    assert said in capsys.readouterr().err
