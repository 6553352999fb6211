"""The readiness checks: each passes a decoder that replays the eager step and fails one with the
fault it looks for.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.decode import Mode
from dsv4.errors import UserError
from dsv4.ops import TORCH
from dsv4.ops.trees import tensors_in
from dsv4.validate import decode_checks, graph_readiness
from dsv4.validate.decode_checks import (
    REPLAYS,
    START,
    STEPS,
    Check,
    EagerRun,
    attempt,
    cache_tensors,
    check_capture,
    check_memory,
    check_replay,
    expected_regions,
    no_synchronization,
    positions,
    same_bits,
    start_sequence,
)
from dsv4.validate.graph_readiness import main
from dsv4.validate.sync_scan import Finding, Place
from tests.model.tiny import small_config, tiny_engine
from tests.ranks.simulated import ranks_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    room = START + STEPS + REPLAYS
    return tiny_engine(small_config((4, 128)), max_context=room, kv_dtype="fp8")


@pytest.fixture(scope="module")
def run(engine: Engine) -> EagerRun:
    return EagerRun.of(engine)


@dataclass
class FakeDecoder:
    """Replays eagerly on ``engine``; ``fault(position, logits)`` spoils something after a step."""

    engine: Engine
    fault: Callable[[int, Tensor], object] = lambda position, logits_TV: None
    regions: list[str] = field(default_factory=list)

    def replay(self, token_ids: int, position: int) -> Tensor:
        self.engine.state.set_position(position)
        logits_TV = self.engine.decode(
            [token_ids]
        ).clone()  # No longer an inference tensor: faults may change it.
        self.fault(position, logits_TV)
        return logits_TV


def ring(engine: Engine) -> Tensor:
    return engine.state.layers[1].keys.ring.data


def test_a_decoder_that_replays_the_eager_step_passes(engine: Engine, run: EagerRun) -> None:
    check = check_replay("full", engine, FakeDecoder(engine), run)
    assert check == Check("full: replay", True, check.detail)
    assert "122 to 133" in check.detail
    assert START // 128 < (START + STEPS) // 128, "the steps complete a window of 128"


def test_what_an_earlier_check_left_in_the_caches_is_no_difference(
    engine: Engine, run: EagerRun
) -> None:
    start_sequence(engine, run.prompt + run.tokens + run.tokens)
    assert check_replay("full", engine, FakeDecoder(engine), run).passed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        # The window of 128 is complete with position 127, and the one of 4 before it with 123.
        (
            lambda engine, position, logits: logits.add_((position == 127) * 1e-6),
            "position 127: logits differ",
        ),
        (
            lambda engine, position, logits: logits[0, 5].mul_(-0.0 if position == 123 else 1),
            "position 123: logits",
        ),
        (
            lambda engine, position, logits: logits.fill_(math.nan),
            "differ from the eager ones by up to nan",
        ),
        (lambda engine, position, logits: engine.state.advance(1), "position: found"),
        (
            lambda engine, position, logits: engine.state.positions_1[torch.device("cpu")].add_(
                position == 133
            ),
            "found",
        ),
        (
            lambda engine, position, logits: ring(engine)[133].bitwise_xor_(position == 133),
            "first in layer 1 window ring",
        ),
    ],
)
def test_a_wrong_replay_fails(engine: Engine, run: EagerRun, fault: Callable, message: str) -> None:
    check = check_replay(
        "full", engine, FakeDecoder(engine, lambda *step: fault(engine, *step)), run
    )
    assert not check.passed
    assert message in check.detail
    assert check.detail.startswith("dsv4/validate/decode_checks.py:")


def test_the_caches_of_every_layer_are_compared(engine: Engine) -> None:
    tensors = dict(cache_tensors(engine.state))
    for name in (
        "0 window ring",
        "0 index rows",
        "0 compressed rows",
        "1 compressed rows",
        "1 window ring scales",
    ):
        assert f"layer {name}" in tensors
    held = {tensor.data_ptr() for tensor in tensors_in(engine.state.layers)}
    assert sorted(tensor.data_ptr() for tensor in tensors.values()) == sorted(held)


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([[1.0, math.nan]])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([0.0], dtype=torch.float64))


def test_memory_that_grows_fails(
    engine: Engine, run: EagerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_checks, "REPLAYS", 5)
    counts = iter([{"allocated": 7}, {"allocated": 7}, {"allocated": 7}, {"allocated": 8}])
    passed, failed = (
        check_memory("full", engine, FakeDecoder(engine), run, lambda: next(counts))
        for _ in range(2)
    )
    assert passed.passed
    assert not failed.passed
    assert "found {'allocated': 8} after 5 replays, expected {'allocated': 7}" in failed.detail


def test_a_capture_without_some_layer_or_that_moves_the_position_fails(
    engine: Engine, run: EagerRun
) -> None:
    start_sequence(engine, run.prompt[:9])
    graphs = [f"layer {layer} graph {part}" for layer in range(2) for part in "AB"]
    whole = [*graphs, "layer 1 mix", "head, sample"]

    def checked(
        regions: list[str], mode: Mode = "split", action: Callable[[], object] = lambda: None
    ) -> Check:
        def make() -> FakeDecoder:
            action()
            return FakeDecoder(engine, regions=regions)

        check, decoder = check_capture(mode, engine, make)
        assert decoder is not None or not check.passed
        return check

    assert checked(whole).detail == "6 regions, the position unchanged"
    alone = checked(["layers 0 to 1, head, sample"], "full")
    assert (alone.passed, alone.detail) == (True, "1 region, the position unchanged")
    missing = checked(whole[:3] + whole[4:])
    assert (missing.passed, "expected layer 1 graph B as well" in missing.detail) == (False, True)
    moved = checked(whole, action=lambda: engine.state.set_position(8))
    assert "found [8, 8] on the host and the devices, expected [9, 9]" in moved.detail
    assert positions(engine.state) == [8, 8]

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    failed = checked(whole, action=fail)
    assert failed.detail.endswith(": operation not permitted when stream is capturing")


def test_every_segment_has_its_regions(engine: Engine) -> None:
    (segment,) = engine.model.segments
    halves = [replace(segment, layers=(layer,)) for layer in segment.layers]
    assert expected_regions("full", halves) == {"layers 0 to 0", "layers 1 to 1, head, sample"}
    mixes = {"layer 0 mix", "layer 1 mix"}
    assert mixes <= expected_regions("split", halves)
    assert mixes - expected_regions("split", [segment]) == {"layer 0 mix"}


def test_eager_steps_that_fail_are_a_failed_check_and_the_last_one(engine: Engine) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    broken = tiny_engine(small_config((4,)), ops=replace(TORCH, sparse_attention=fail))
    (check,), regions = graph_readiness.check_engine(broken, ["full"])
    assert (check.name, check.passed, regions) == ("eager steps", False, {})
    assert check.detail.startswith("dsv4/layers/attention.py:")
    assert check.detail.endswith(": CUDA error: an illegal memory access was encountered")


def test_an_error_names_the_line_of_the_package() -> None:
    def action() -> str:
        fresh = SimpleNamespace(state=SimpleNamespace(undoable_tokens=0), _end_run=lambda: None)
        return str(Engine.rewind(cast(Any, fresh), 1))

    with pytest.raises(ValueError, match="tokens: found 1"):
        attempt("a user error is no check", action)
    assert attempt("passes", lambda: "as told") == Check("passes", True, "as told")


def test_the_static_part_needs_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(graph_readiness, "scan_tree", list)
    assert main(["--static-only", "--json", str(report)]) == 0
    assert capsys.readouterr().out.startswith("passed  static scan  ")
    written = json.loads(report.read_text())
    assert (
        written["command"]
        == f"python -m dsv4.validate.graph_readiness --static-only --json {report}"
    )
    assert [check["passed"] for check in written["checks"]] == [True]


def test_a_finding_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    finding = Finding(Place("dsv4/model.py", "Model.step", "item"), 7)
    monkeypatch.setattr(graph_readiness, "scan_tree", lambda: [finding, finding])
    assert main(["--static-only"]) == 1
    assert (
        capsys.readouterr().out.count("FAILED  static scan  dsv4/model.py:7: item in Model.step")
        == 2
    )


def test_the_checks_need_recorded_steps(engine: Engine) -> None:
    with pytest.raises(UserError, match="found the torch ops, expected 'cuda'"):
        graph_readiness.check_engine(engine, ["full"])


def test_without_a_gpu_the_rest_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(graph_readiness, "scan_tree", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    output = capsys.readouterr()
    expected = "found no CUDA device, expected one; --static-only does without"
    assert output.err == f"error: graph_readiness: {expected}\n"
    assert output.out == ""


@pytest.mark.gpu
def test_the_demo_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = tmp_path / "report.json"
    assert main(["--json", str(report)]) == 0, capsys.readouterr().out
    written = json.loads(report.read_text())
    assert set(written["regions"]) == {"split", "full"}
    assert [check["name"] for check in written["checks"] if not check["passed"]] == []


@pytest.mark.gpu
def test_a_step_that_waits_is_found() -> None:
    value = torch.ones(1, device="cuda")
    with no_synchronization():
        assert not attempt("waits", lambda: str(value.item())).passed
    assert attempt("waits outside", lambda: str(value.item())).passed


def test_caches_and_positions_of_every_rank_are_compared() -> None:
    engine = ranks_engine(2)
    names = [name for name, _ in cache_tensors(engine.state)]
    own = [name.removeprefix("rank 0 ") for name in names if name.startswith("rank 0 ")]
    assert own == [name.removeprefix("rank 1 ") for name in names if name.startswith("rank 1 ")]
    assert len(names) == 2 * len(own) > 0
    engine.prefill([1, 2, 3])
    assert positions(engine.state) == [3, 3, 3]
