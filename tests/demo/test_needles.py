"""Needle tests: the pair that is asked for stands where it should, and what the command records."""

import json
import random
from pathlib import Path

import pytest

from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.demo.training.needles import Cell, longer_copy, main, table
from dsv4.demo.training.recall import needle, pair_line
from dsv4.encoding import Tokenizer


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tokens", [400, 5000])
def test_the_pair_stands_at_its_depth_in_a_text_of_that_length(tokens: int, depth: float) -> None:
    example = needle(random.Random(3), tokens, depth, 8)
    lines = example.prompt.split("\n")[1:-1]
    key, value = example.answer.removeprefix("The code is ").rstrip(".").split(":")
    assert lines.count(pair_line(key, value)) == 1
    assert abs(lines.index(pair_line(key, value)) - depth * (len(lines) - 1)) <= 0.5
    assert sum("Please note" in line for line in lines) == 8
    assert f"code of {key}?" in example.prompt
    assert abs(len(Tokenizer(CHECKPOINT).encode(example.prompt)) - tokens) <= 0.02 * tokens + 9


def test_a_copy_allows_more_tokens_and_is_the_same_otherwise(tmp_path: Path) -> None:
    copy = longer_copy(CHECKPOINT, 1 << 20, tmp_path)
    raw, before = (
        json.loads((folder / "config.json").read_text()) for folder in (copy, CHECKPOINT)
    )
    assert raw.pop("max_position_embeddings") == 1 << 20
    before.pop("max_position_embeddings")
    assert raw == before
    assert ModelConfig.from_folder(copy).yarn == ModelConfig.from_folder(CHECKPOINT).yarn
    names = [sorted(path.name for path in folder.iterdir()) for folder in (copy, CHECKPOINT)]
    assert names[0] == names[1]


def test_the_table_has_a_row_for_each_length_and_a_column_for_each_depth() -> None:
    cells = [Cell(200, 0.0, 4, 3), Cell(200, 1.0, 4, 4), Cell(1000, 0.0, 4, 0), Cell(1000, 1.0, 4)]
    assert table(cells).splitlines() == [
        "| tokens | depth 0 | depth 1 |",
        "|---|---|---|",
        "| 200 | 3 of 4 | 4 of 4 |",
        "| 1,000 | 0 of 4 | 0 of 4 |",
    ]


@pytest.mark.slow
def test_short_needles_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "needles.json"
    flags = ["--lengths", "150", "300", "--depths", "0", "1", "--each", "1", "--device", "cpu"]
    assert main([*flags, "--json", str(out)]) == 0
    assert "| 300 | 1 of 1 | 1 of 1 |" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert [cell["exact"] for cell in record["needles"]] == [1, 1, 1, 1]
    assert all(abs(cell["longest_prompt"] - cell["length"]) < 20 for cell in record["needles"])
