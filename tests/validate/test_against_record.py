"""What ``--against`` writes as JSON, and values that say nothing beside others that do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.validate.cosine import main
from tests.model.tiny import raw_config
from tests.validate.trace_files import random, write


def record(folder: Path, ours: Path, *theirs: Path) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was written."""
    written = folder / "out.json"
    files = ["--trace", str(ours), "--against", *map(str, theirs), "--json", str(written)]
    return main(files), json.loads(written.read_text())


def test_the_error_is_relative_to_their_value(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours.safetensors", {"hidden": torch.ones(6, 4)})
    theirs = write(tmp_path / "theirs.safetensors", {"hidden": torch.full((6, 4), 2.0)})
    code, written = record(tmp_path, ours, theirs)
    assert code == 1
    assert [row["relative_error"] for row in written["rows"]] == [0.5]


def test_names_of_one_side_are_written_in_the_order_of_execution(tmp_path: Path) -> None:
    def side(name: str, *only: str) -> Path:
        names = ("hidden", *only)
        return write(tmp_path / name, {value: random(6, 2) for value in names})

    ours = ("layers.2.attn.q", "layers.10.attn_hc.x", "logits")
    theirs = ("layers.2.streams", "layers.2.mine", "layers.10.attn.kv")
    code, written = record(tmp_path, side("ours", *ours), side("theirs", *theirs))
    assert code == 0
    assert written["only_ours"] == [*ours]
    assert written["only_theirs"] == [*theirs]
    assert written["first"] is None


def test_ranks_that_differ_are_written(tmp_path: Path) -> None:
    value = torch.zeros(6, 4)
    paths = [
        write(tmp_path / f"{rank}", {"hidden": value + rank / 2}, rank=str(rank), ranks="3")
        for rank in range(3)
    ]
    ours = write(tmp_path / "ours", {"hidden": value})
    code, written = record(tmp_path, ours, *paths)
    assert code == 1
    assert written["unequal"] == {"hidden": {"ranks": [0, 2], "difference": 1.0}}


@pytest.mark.parametrize("labelled", [0, 1])
def test_a_value_without_rows_does_not_end_the_comparison_of_others(
    tmp_path: Path, labelled: int
) -> None:
    """Of a short sequence a layer may have compressed nothing. Whoever has a configuration says
    the kinds of layers.
    """
    values: dict[str, Tensor] = {
        "layers.1.attn.compressed": random(0, 8),
        "layers.1.streams": random(6, 2, 8),
    }
    paths = [
        write(
            tmp_path / f"{side}", values, 6, **({"config": raw_config((0, 4))} if has_one else {})
        )
        for side, has_one in enumerate((labelled == 0, labelled == 1))
    ]
    code, written = record(tmp_path, *paths)
    assert code == 0
    assert [(row["kind"], row["worst_at"]) for row in written["rows"]] == [
        ("CSA", None),
        ("CSA", 0),
    ]
