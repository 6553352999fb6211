"""What the reports say of a value: NaN is the least, and what was not compared has no number."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.validate import cosine, layers
from dsv4.validate.agreement import Agreement
from dsv4.validate.layer_walk import LayerResult
from dsv4.validate.layers import line, points
from dsv4.validate.plot import cosine_svg
from tests.validate.trace_files import random, write


def row(value: str, worst_token: float) -> Agreement:
    under = None if worst_token >= 0.999 else 0
    name = f"layers.1.{value}"
    return Agreement(name, "SWA", worst_token, worst_token, 0, 0.0, under, 0, 1, None)


def test_nan_is_the_least_of_all_values() -> None:
    rows = [row("attn.kv", 0.5), row("attn.heads", math.nan), row("streams", 0.1)]
    found = line(LayerResult(1, "SWA", 8, 0.0, rows, [], []))
    assert "  0.10000000  attn.heads nan  under the threshold: attn.kv, attn.heads," in found


def test_a_layer_says_nothing_of_what_was_not_compared() -> None:
    rows = [replace(row("router.weights", 1.0), worst_at=None), row("router.experts", 0.0)]
    result = LayerResult(1, "SWA", 8, 0.0, rows, [], [])
    assert "router.weights" not in line(result)
    assert [point.name for point in points([result])] == ["layers.1.router.experts"]


def test_a_point_is_the_worst_token_or_the_share_of_all_choices() -> None:
    value = replace(row("attn.kv", 0.5), cosine=0.9)
    share = replace(value, name="layers.1.router.experts", relative_error=None)
    found = points([LayerResult(1, "SWA", 8, 0.0, [value, share], [], [])])
    assert [point[3:] for point in found] == [(0.5, 0.9, False), (0.9, 0.9, False)]
    assert {point.column for point in found} == {"layer 1, 8"}


def test_layers_stand_below_one_head_and_the_record_says_what_was_compared(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--device", "cpu", "--model", str(model), "--layers", "0:2"]
    written = tmp_path / "found.json"
    lengths = ["--tokens", "3", "--context", "5", "--json", str(written)]
    assert layers.main([*flags, *lengths]) == 0
    words = [text.split()[:2] for text in capsys.readouterr().out.splitlines()]
    assert words == [["layer", "kind"], ["0", "SWA"], ["1", "CSA"], ["peak", "memory:"]]
    record = json.loads(written.read_text())
    assert record["command"] == " ".join(["python -m dsv4.validate.layers", *flags, *lengths])
    expected = {
        "layout": None,
        "input": "own",
        "reference": "torch",
        "threshold": 0.999,
        "choices": 0.95,
        "tokens": 3,
        "context": 5,
        "unequal": {},
    }
    assert {name: record[name] for name in expected} == expected
    assert all({*layer} == {*LayerResult._fields} for layer in record["layers"])


def test_choices_have_the_colour_of_their_own_limit() -> None:
    share = Agreement("layers.1.router.experts", "SWA", 0.97, 0.5, 0, None, None, 0, 1, None)
    under = replace(share, name="layers.1.indexer.entries", cosine=0.9, first_under=0)
    result = LayerResult(1, "SWA", 8, 0.0, [share, under, row("streams", 1.0)], [], [])
    marks = cosine_svg(points([result]), 0.999).partition("<g>")[2].splitlines()
    assert ["#c00" in mark for mark in marks[:3]] == [False, True, False]


def test_a_plot_says_nothing_of_what_was_not_compared(tmp_path: Path) -> None:
    experts = torch.tensor([[1, 2]] * 6)
    paths = [
        write(
            tmp_path / f"{first}.safetensors",
            {"layers.0.router.experts": experts + first, "layers.0.router.weights": random(6, 2)},
        )
        for first in (0, 4)
    ]
    svg = tmp_path / "a.svg"
    files = ["--trace", str(paths[0]), "--against", str(paths[1]), "--svg", str(svg)]
    assert cosine.main(files) == 1
    assert svg.read_text().count("<title>") == 1
