"""``--profile``: ops by layer kind and gaps of an eager run, kernels of a captured one."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.layers.values import UNTRACED
from dsv4.measure.op_profile import OpProfile
from dsv4.model import PartKind
from dsv4.ops import TORCH, Ops
from dsv4.step.direct import DirectParts
from dsv4.step.kernel_names import CALL
from dsv4.step.observer import open_part
from dsv4.step.step import Step
from tests.driver.conftest import Result, read_json
from tests.driver.recorded import recorded_step

Drive = Callable[..., Result]
CPU = torch.device("cpu")
KINDS = ("SWA", "CSA")


def fake_ops(clock: list[float]) -> Ops:
    """Ops that take a second, five for the moe, and return nothing."""

    def take(seconds: float) -> Callable[..., None]:
        def op(*_: object) -> None:
            clock[0] += seconds

        return op

    names = ("embed", "hc_pre", "hc_post", "hc_head", "linear", "sample_token")
    return replace(TORCH, moe=take(5.0), **{name: take(1.0) for name in names})


class Arriving(torch.Tensor):
    """Streams whose way to another device takes time."""

    clock: list[float]
    seconds: float

    def to(self, *_: object) -> torch.Tensor:
        self.clock[0] += self.seconds
        return self


def step(ops: Ops, clock: list[float], profile: OpProfile, hop: float = 0.0) -> None:
    """Two layers with a hand-off between them, the head and a token; half a second before every
    moe.
    """
    profile.begin_step()
    parts = DirectParts(ops, torch.zeros(1, dtype=torch.int64), UNTRACED, profile)

    def part(kind: PartKind, layer: int | None, *names: str) -> None:
        with parts.part(kind, CPU, layer) as watched:
            for op in names:
                clock[0] += 0.5 * (op == "moe")
                getattr(watched, op)()

    part("projections", 0, "embed", "hc_pre")
    part("experts", 0, "moe")
    part("mix", 0, "hc_post")
    streams = Arriving(1)
    streams.clock = clock
    streams.seconds = hop
    parts.hand_off(streams, CPU, CPU)
    part("experts", 1, "moe")
    part("mix", 1, "hc_post")
    part("head", None, "hc_head", "linear")
    part("sample", None, "sample_token")


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> OpProfile:
    clock = [0.0]
    monkeypatch.setattr("dsv4.measure.op_profile.time.perf_counter", lambda: clock[0])
    profile = OpProfile([CPU], KINDS)
    ops = fake_ops(clock)
    step(ops, clock, profile, hop=3.0)
    profile.next_phase("decode")
    clock[0] += 7.0
    step(ops, clock, profile)
    clock[0] += 9.0
    step(ops, clock, profile, hop=3.0)
    return profile


def test_ops_are_counted_by_phase_and_kind_of_their_part(profile: OpProfile) -> None:
    assert profile.seconds["prefill", "SWA", "moe"] == 5.0
    assert profile.seconds["decode", "CSA", "moe"] == 10.0
    expected = [("SWA", "hc_post"), ("CSA", "hc_post"), ("SWA", "embed"), ("head", "linear")]
    assert [profile.calls["decode", kind, name] for kind, name in expected] == [2, 2, 2, 2]
    assert not any(kind == "head" for _, kind, name in profile.calls if name in ("moe", "hc_pre"))


def test_gaps_are_told_apart_and_hand_offs_are_a_row(profile: OpProfile) -> None:
    assert profile.seconds["prefill", "between devices", "(hand-offs)"] == 3.0
    assert profile.seconds["decode", "between devices", "(hand-offs)"] == 3.0
    assert profile.seconds["decode", "head", "(between steps)"] == 16.0
    assert profile.seconds["decode", "SWA", "(between ops)"] == 1.0


def test_ops_and_gaps_are_the_whole_time(profile: OpProfile) -> None:
    decode = sum(seconds for (phase, *_), seconds in profile.seconds.items() if phase == "decode")
    assert decode == 7.0 + 18.0 + 9.0 + 18.0 + 3.0


def test_table_has_a_column_per_kind(profile: OpProfile) -> None:
    blocks = profile.table().split("decode")
    assert len(blocks) == 2
    heading, *rows = (line.split() for line in blocks[1].splitlines())
    assert heading[-3:] == ["SWA", "CSA", "head"]
    assert rows[0] == ["moe", "4", "20000.000", "36.4", "5000000.00", "5000000.00"]
    assert ["(hand-offs)", "2", "3000.000", "5.5"] in rows


def test_ranks_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("dsv4.measure.op_profile.time.perf_counter", lambda: clock[0])
    profile = OpProfile([CPU, torch.device("meta")], KINDS, ranks=2)
    profile.begin_step()
    for seconds, device in ((1.0, "cpu"), (3.0, "meta")):
        with profile.part("layer 0 experts", torch.device(device), 0), profile.item("moe"):
            clock[0] += seconds
    found = {name: taken for (_, _, name), taken in profile.seconds.items() if "moe" in name}
    assert found == {"moe, rank 0": 1.0, "moe, rank 1": 3.0}
    assert profile.visits["prefill", "SWA"] == 1


def test_time_of_an_op_that_fails_is_not_counted(profile: OpProfile) -> None:
    calls = profile.calls["decode", "head", "linear"]
    failing = profile.item("linear")
    with pytest.raises(ZeroDivisionError), open_part(TORCH, profile, "head", CPU), failing:
        raise ZeroDivisionError
    assert profile.calls["decode", "head", "linear"] == calls


class FakeProgram:
    """Notes which items run, of all programs alike."""

    ran: ClassVar[list[tuple[str, int, int, int]]] = []

    def __init__(self, recording: Recording, memory: object) -> None:
        self._device = recording.target.device.type

    def run(self, tokens: int, start: int, stop: int, dense: bool = False) -> None:
        assert not dense
        self.ran.append((self._device, tokens, start, stop))

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class FakeHandOff:
    """Notes what is sent, and where its memory is free again."""

    def __init__(self) -> None:
        self.log: list[int | str] = []

    def send(self, tensor: torch.Tensor) -> None:
        self.log.append(tensor.shape[0])

    def drain(self) -> None:
        self.log.append("drained")


@pytest.mark.parametrize("tokens", [1, 2])
def test_observed_step_runs_its_kernels_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr("dsv4.step.step.Program", FakeProgram)
    monkeypatch.setattr(FakeProgram, "ran", [])
    devices = (CPU, torch.device("meta"))
    hand_off = FakeHandOff()
    step = Step(recorded_step(*devices), {}, {devices: hand_off})  # type: ignore[dict-item]
    profile = OpProfile(devices, KINDS)
    step.run(tokens, observer=profile)
    step.sample(profile)
    many = [("SWA", "many")] if tokens > 1 else []
    assert [(kind, name) for _, kind, name in profile.calls if name != "(between ops)"] == [
        ("SWA", "embed"),
        *many,
        ("SWA", "gemm"),
        ("between devices", "(hand-offs)"),
        ("CSA", "gemm"),
        ("head", CALL),
        ("head", "store"),
    ]
    assert hand_off.log == [tokens, "drained"]
    first = [("cpu", tokens, item, item + 1) for item in range(3) if tokens > 1 or item != 1]
    second = [("meta", tokens, 0, 1), ("meta", tokens, 1, 2), ("meta", 1, 2, 3)]
    assert FakeProgram.ran == first + second


def test_profile_lists_every_op_of_the_step(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--device", "cpu", "--max-tokens", 3, "--ignore-eos", "--profile", "--json", path)
    result = drive(*flags)
    for op in ("embed", "moe", "sparse_attention", "hc_pre", "row_parallel_linear", "sample_token"):
        assert (
            len(re.findall(rf"^  {op} +\d+ +[\d.]+ +[\d.]+( +[\d.]+)+$", result.err, re.MULTILINE))
            == 2
        )
    profile = read_json(path)["profile"]
    assert profile["mode"] == "eager"
    calls = {(row["phase"], row["kind"], row["op"]): row["calls"] for row in profile["ops"]}
    # The tiny model's layers are SWA, CSA, HCA, CSA.
    assert [calls["decode", kind, "moe"] for kind in ("SWA", "CSA", "HCA")] == [2, 4, 2]
    assert (calls["prefill", "CSA", "moe"], calls["prefill", "head", "hc_head"]) == (2, 1)
    assert calls["decode", "head", "(between steps)"] == 2


@pytest.mark.gpu
def test_profile_of_recorded_steps_lists_kernels(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--device", "cuda", "--max-tokens", 4, "--ignore-eos", "--json", path)
    plain = drive(*flags, "--temperature", 0)
    tokens = read_json(path)["completion"]["token_ids"]
    result = drive(*flags, "--temperature", 0, "--profile")
    report = read_json(path)
    assert (result.code, result.out) == (0, plain.out)
    assert report["completion"]["token_ids"] == tokens
    profile = report["profile"]
    assert profile["mode"] == "eager"
    calls = {(row["phase"], row["kind"], row["op"]): row["calls"] for row in profile["ops"]}
    assert [calls["decode", kind, "moe_decode"] for kind in ("SWA", "CSA", "HCA")] == [3, 6, 3]
    assert (calls["decode", "head", "store_token"], calls["decode", "SWA", "embed"]) == (3, 3)
    assert calls["decode", "head", "(between steps)"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["split", "full"])
def test_profile_of_captured_graphs_explains_a_token(
    drive: Drive, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "report.json"
    flags = ("--device", "cuda", "--max-tokens", 4, "--ignore-eos", "--profile", "--json", path)
    result = drive("--cuda-graph", mode, *flags)
    assert result.code == 0
    assert "decode, one token" in result.err
    profile = read_json(path)["profile"]
    assert (profile["mode"], profile["tokens"] > 4) == (mode, True)
    kernels = {row["name"]: row["count"] for row in profile["kernels"]}
    assert (kernels["moe_decode"], kernels["store_token"]) == (4, 1)
    assert sum(row["us"] for row in profile["kernels"]) == pytest.approx(profile["us"], rel=1e-3)
    assert set(profile["us_per_layer"]) == {"SWA", "CSA", "HCA"}
    nodes = profile["nodes"]
    assert {node["layer"] for node in nodes} == {None, 0, 1, 2, 3}
    assert sum(row["count"] for row in profile["kernels"] if row["name"][0] != "(") == len(nodes)
    stored = [node for node in nodes if node["name"] == "store_token"]
    assert [(node["part"], node["kind"]) for node in stored] == [("sample", "head")]
