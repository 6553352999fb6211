"""Validators and profiles with a rank on each of two GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4.bench.__main__ as bench
from dsv4.validate import cosine, graph_readiness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS = ("--gpus", "2", "--parallel", "tensor")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("chunk", ["4", "64"])
def test_every_layer_of_the_ranks_is_that_of_the_torch_ops(tmp_path: Path, chunk: str) -> None:
    out = str(tmp_path / "cosine.json")
    line = ["--device", "cuda", *RANKS, "--random-tokens", "64", "--chunk", chunk, "--json", out]
    assert cosine.main(line) == 0
    assert len(read(tmp_path / "cosine.json")["rows"]) > 4


def test_steps_of_ranks_are_ready_for_graphs(tmp_path: Path) -> None:
    out = tmp_path / "readiness.json"
    assert graph_readiness.main([*RANKS, "--json", str(out)]) == 0
    assert all(check["passed"] for check in read(out)["checks"])


def test_a_profile_shows_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    sizes = ["--prompt-tokens", "32", "--decode-tokens", "12", "--repeats", "1"]
    line = ["engine", "--device", "cuda", *RANKS, "--modes", "full", "--profile", *sizes]
    assert bench.main([*line, "--out", str(out)]) == 0
    ranks = read(out)["result"]["profile"]["full"]["ranks"]
    assert [list(rank["busy_us"]) for rank in ranks] == [["0"], ["1"]]
    names = [[row["name"] for row in rank["kernels"]] for rank in ranks]
    assert set(names[0]) == set(names[1])
    assert "gather_logits" in names[0]
    said = capsys.readouterr().err
    assert "\nrank 0\ndecode, one token" in said
    assert "\nrank 1\ndecode, one token" in said
