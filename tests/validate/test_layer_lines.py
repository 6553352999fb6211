"""What the reports say of a value: NaN is the least, and what was not compared has no number."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.validate import cosine
from dsv4.validate.agreement import Agreement
from dsv4.validate.layer_walk import LayerResult
from dsv4.validate.layers import line, points
from dsv4.validate.plot import cosine_svg
from tests.validate.trace_files import random, write


def row(value: str, worst_token: float) -> Agreement:
    under = None if worst_token >= 0.999 else 0
    return Agreement(f"layers.1.{value}", "SWA", worst_token, worst_token, 0, 0.0, under)


def test_nan_is_the_least_of_all_values() -> None:
    rows = [row("attn.kv", 0.5), row("attn.heads", math.nan), row("streams", 0.1)]
    found = line(LayerResult(1, "SWA", 8, 0.0, rows, [], []))
    assert "  0.10000000  attn.heads nan  under the threshold: attn.kv, attn.heads," in found


def test_a_layer_says_nothing_of_what_was_not_compared() -> None:
    rows = [replace(row("router.weights", 1.0), worst_at=None), row("router.experts", 0.0)]
    result = LayerResult(1, "SWA", 8, 0.0, rows, [], [])
    assert "router.weights" not in line(result)
    assert [point.name for point in points([result])] == ["layers.1.router.experts"]


def test_choices_have_the_colour_of_their_own_limit() -> None:
    share = Agreement("layers.1.router.experts", "SWA", 0.97, 0.5, 0, None, None)
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
