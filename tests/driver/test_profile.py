"""``--profile``: ops by layer kind and gaps of an eager run, kernels of a captured one."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.cli.op_profile import OpProfile
from dsv4.ops import TORCH, Ops
from tests.driver.conftest import Result, read_json

Drive = Callable[..., Result]
KINDS = ("SWA", "CSA")


def fake_ops(clock: list[float]) -> Ops:
    """Ops that take a second, five for the moe, and return nothing."""

    def take(seconds: float) -> Callable[..., None]:
        def op(*_: object) -> None:
            clock[0] += seconds

        return op

    names = ("embed", "hc_pre", "hc_seam", "hc_post", "hc_head", "linear", "argmax_token")
    return replace(TORCH, moe=take(5.0), **{name: take(1.0) for name in names})


def step(ops: Ops, clock: list[float], hop: float = 0.0) -> None:
    """Two layers, the second one on another device, and the head; half a second before every moe."""
    first, second = torch.empty(1), torch.empty(1, device="meta")
    ops.embed(first)
    ops.hc_pre(first)
    clock[0] += 0.5
    ops.moe(first)
    ops.hc_post(first)
    clock[0] += hop
    ops.hc_pre(second)
    clock[0] += 0.5
    ops.moe(second)
    ops.hc_post(second)
    ops.hc_head(second)
    ops.linear(second)
    ops.argmax_token(second)


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> OpProfile:
    clock = [0.0]
    monkeypatch.setattr("dsv4.cli.op_profile.time.perf_counter", lambda: clock[0])
    profile = OpProfile(on_cuda=False, kinds=KINDS)
    ops = profile.wrap(fake_ops(clock))
    step(ops, clock, hop=3.0)
    profile.next_phase("decode")
    clock[0] += 7.0
    step(ops, clock)
    clock[0] += 9.0
    step(ops, clock, hop=3.0)
    return profile


def test_ops_are_counted_by_phase_and_kind(profile: OpProfile) -> None:
    assert profile.seconds["prefill", "SWA", "moe"] == 5.0
    assert profile.seconds["decode", "CSA", "moe"] == 10.0
    assert (profile.calls["decode", "SWA", "hc_post"], profile.calls["decode", "CSA", "hc_post"]) == (2, 2)
    assert (profile.calls["decode", "head", "embed"], profile.calls["decode", "head", "linear"]) == (2, 2)
    assert not any(kind == "head" for _, kind, name in profile.calls if name in ("moe", "hc_pre"))


def test_gaps_are_told_apart(profile: OpProfile) -> None:
    assert profile.seconds["prefill", "CSA", "(hand-offs)"] == 3.0
    assert profile.seconds["decode", "CSA", "(hand-offs)"] == 3.0
    assert profile.seconds["decode", "head", "(between steps)"] == 16.0
    assert profile.seconds["decode", "SWA", "(between ops)"] == 1.0


def test_ops_and_gaps_are_the_whole_time(profile: OpProfile) -> None:
    decode = sum(seconds for (phase, *_), seconds in profile.seconds.items() if phase == "decode")
    assert decode == 7.0 + 19.0 + 9.0 + 19.0 + 3.0


def test_table_has_a_column_per_kind(profile: OpProfile) -> None:
    blocks = profile.table().split("decode")
    assert len(blocks) == 2
    moe = next(line for line in blocks[1].splitlines() if line.startswith("  moe "))
    assert moe.split() == ["moe", "4", "20000.000", "35.1", "5000000.00", "5000000.00"]


def test_profile_lists_every_op_of_the_step(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = drive("--max-tokens", 3, "--ignore-eos", "--profile", "--json", path)
    for op in ("embed", "moe", "sparse_attention", "hc_pre", "linear", "sample_token"):
        assert len(re.findall(rf"^  {op} +\d+ +[\d.]+ +[\d.]+( +[\d.]+)+$", result.err, re.MULTILINE)) == 2
    profile = read_json(path)["profile"]
    assert profile["mode"] == "eager"
    calls = {(row["phase"], row["kind"], row["op"]): row["calls"] for row in profile["ops"]}
    # The tiny model's layers are SWA, CSA, HCA, CSA.
    assert [calls["decode", kind, "moe"] for kind in ("SWA", "CSA", "HCA")] == [2, 4, 2]
    assert (calls["prefill", "CSA", "moe"], calls["prefill", "head", "hc_head"]) == (2, 1)
    assert calls["decode", "head", "(between steps)"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["split", "full"])
def test_profile_of_captured_graphs_explains_a_token(drive: Drive, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "report.json"
    flags = ("--device", "cuda", "--cuda-graph", mode, "--max-tokens", 4, "--ignore-eos", "--profile", "--json", path)
    result = drive(*flags)
    assert result.code == 0
    assert "decode, one token" in result.err
    profile = read_json(path)["profile"]
    assert (profile["mode"], profile["tokens"] > 4) == (mode, True)
    kernels = {row["name"]: row["count"] for row in profile["kernels"]}
    assert (kernels["moe_decode"], kernels["store_token"]) == (4, 1)
    assert sum(row["us"] for row in profile["kernels"]) == pytest.approx(profile["us"], rel=1e-3)
    assert set(profile["us_per_layer"]) == {"SWA", "CSA", "HCA"}
    assert {node["layer"] for node in profile["nodes"]} == {None, 0, 1, 2, 3}
    assert sum(row["count"] for row in profile["kernels"] if row["name"][0] != "(") == len(profile["nodes"])
