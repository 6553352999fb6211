"""Checks in a child process: what a fault there leaves behind, and that it ends there."""

import json

import pytest
import torch

from dsv4.native.check import Result, Verdict
from dsv4.native.run_checks import _fault, _verdict, run_checks
from tests.native import fakes

CPU = torch.device("cpu")


def outcomes(verdict: Verdict) -> list[str]:
    return [result.outcome for result in verdict.results]


def fake(checks: str) -> Verdict:
    return run_checks(f"{fakes.__name__}:{checks}", CPU, 120.0)


def lines(*records: dict) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


PLANNED = {"checks": [["small", "gemm"], ["real", "gemm"], ["large", "gemm"]]}
PASSED = {"ends": 0, "outcome": "passed", "reason": None}


def test_a_check_that_never_ended_has_the_fault() -> None:
    verdict = _verdict("m:f", lines(PLANNED, {"begins": 0}, PASSED, {"begins": 1}), "no answer")
    assert outcomes(verdict) == ["passed", "failed", "not run"]
    assert verdict.complaint == "gemm (real): no answer"
    assert verdict.conclusive


def test_a_line_that_was_cut_short_is_no_answer() -> None:
    told = lines(PLANNED, {"begins": 0}, PASSED, {"begins": 1}) + b'{"ends": 1, "outc'
    assert outcomes(_verdict("m:f", told, "ended")) == ["passed", "failed", "not run"]


def test_a_child_that_never_began_has_no_verdict_that_passes() -> None:
    assert _verdict("m:f", b"", "no module").complaint == "m:f (start): no module"
    assert not _verdict("m:f", lines({"checks": []}), None).passed


def test_a_fault_behind_the_last_check_counts() -> None:
    told = lines({"checks": [["small", "gemm"]]}, {"begins": 0}, PASSED)
    assert _verdict("m:f", told, None).passed
    assert _verdict("m:f", told, "ended by a signal").complaint == "m:f (end): ended by a signal"


def test_missing_memory_says_nothing() -> None:
    verdict = Verdict((Result("small", "gemm", "not run", "ran out of memory"),))
    assert not verdict.passed
    assert not verdict.conclusive


def test_the_reason_is_the_error_not_the_advice_behind_it() -> None:
    log = b"Traceback\ntorch.AcceleratorError: CUDA error: an illegal address\n  Search for it\n\n"
    assert _fault(1, log, 9) == "torch.AcceleratorError: CUDA error: an illegal address"
    assert _fault(134, b"terminate called\n", 9) == "terminate called"
    assert _fault(139, b"", 9) == "ended with exit code 139"
    assert _fault(124, b"", 9) == "no answer within 9 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checks", "found", "complaint"),
    [
        ("right", ["passed", "passed"], None),
        ("wrong", ["passed", "failed"], "fake_gemm (real): 9 of 72 values are wrong, at (0, 7)"),
        (
            "refused",
            ["passed", "passed", "failed", "not run"],
            "fake_gemm (large): RuntimeError: CUDA driver error: CUDA_ERROR_INVALID_VALUE",
        ),
        ("crashing", ["failed"], "fake_gemm (small): "),
        ("without_memory", ["not run", "passed"], "fake_gemm (small): ran out of memory"),
        ("absent", ["failed"], "tests.native.fakes:absent (start): AttributeError"),
    ],
)
def test_verdicts_of_a_child(checks: str, found: list[str], complaint: str | None) -> None:
    verdict = fake(checks)
    assert outcomes(verdict) == found
    if complaint is None:
        assert verdict.passed
    else:
        assert verdict.complaint is not None
        assert verdict.complaint.startswith(complaint)


@pytest.mark.slow
def test_a_hang_ends_at_the_limit() -> None:
    verdict = fakes.run_hanging(f"{fakes.__name__}:hanging", CPU)
    assert outcomes(verdict) == ["passed", "passed", "failed", "not run"]
    expected = [f"fake_gemm (large): no answer within {limit:g} s" for limit in fakes.LIMITS]
    assert verdict.complaint in expected
