"""Faults of native kernels: the driver answers like the portable ones and says so once, or ends
with exit code 2 where native kernels are required.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dsv4.native import form, run_checks, verdict_file
from dsv4.native.check import Result, Verdict
from dsv4.ops.tables import DirectTable
from dsv4.parallel import devices
from tests.driver.conftest import Result as Run
from tests.driver.conftest import read_json
from tests.driver.drive import Drive
from tests.native import fakes

FLAGS = ("--device", "cpu", "--prompt", "Hi", "--max-tokens", "3", "--temperature", "0")
WARNING = "no native kernels, the portable ones are used: "
PASSED = Verdict((Result("small", "fake_gemm", "passed"),))
FAILED = Verdict((Result("small", "fake_gemm", "failed", "12 values are wrong"),))

Native = Callable[..., None]


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Gives the CPU native kernels: a table, and checks or their verdict."""
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))

    def of(
        checks: str = "right", table: DirectTable | None = None, verdict: Verdict | None = None
    ) -> None:
        monkeypatch.setattr(devices, "native_form", lambda engine: fakes.form(checks, table))
        if verdict is not None:
            monkeypatch.setattr(form, "verdict_for", lambda checks, device: verdict)

    return of


def answered(drive: Drive, tmp_path: Path, *flags: str) -> tuple[Run, dict]:
    run = drive(*FLAGS, *flags, "--json", tmp_path / "run.json")
    assert run.code == 0, run.err
    return run, read_json(tmp_path / "run.json")


def test_native_kernels_that_passed_are_used(
    native: Native, drive: Drive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native(verdict=PASSED)
    _, record = answered(drive, tmp_path, "--require-native")
    assert record["ops"] == "native"
    assert caplog.messages == []


def test_only_auto_asks_for_native_kernels(
    native: Native, drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native()
    asked: list[str] = []
    monkeypatch.setattr(form, "verdict_for", lambda checks, device: asked.append(checks))
    _, record = answered(drive, tmp_path, "--ops", "torch")
    assert record["ops"] == "torch"
    assert asked == []


@pytest.mark.parametrize(
    ("table", "verdict", "reason"),
    [
        (None, FAILED, "fake_gemm (small): 12 values are wrong"),
        (fakes.table_of(fakes.wrong_linear), PASSED, "linear"),
        (fakes.table_of(fakes.failing_linear), PASSED, "linear"),
    ],
    ids=["verdict", "wrong on the weights", "refused on the weights"],
)
def test_a_fault_leaves_the_portable_answer_and_one_warning(
    native: Native,
    drive: Drive,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    table: DirectTable | None,
    verdict: Verdict,
    reason: str,
) -> None:
    portable, _ = answered(drive, tmp_path)
    native(table=table, verdict=verdict)
    run, record = answered(drive, tmp_path)
    assert run.out == portable.out
    assert record["ops"] == "torch"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{WARNING}{reason}")
    drive(*FLAGS, "--require-native").assert_user_error("error: --require-native: ", reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        ("wrong", "fake_gemm (real): 9 of 72 values are wrong"),
        ("hanging", "fake_gemm (large): no answer within "),
        ("refused", "fake_gemm (large): RuntimeError: CUDA driver error: CUDA_ERROR_INV"),
    ],
)
def test_planted_faults_end_in_the_child(
    native: Native,
    drive: Drive,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    checks: str,
    reason: str,
) -> None:
    portable, _ = answered(drive, tmp_path)
    native(checks)
    limited = partial(run_checks.run_checks, step_seconds=120.0)
    found = fakes.run_hanging if checks == "hanging" else limited
    monkeypatch.setattr(verdict_file, "run_checks", found)
    run, record = answered(drive, tmp_path)
    assert run.out == portable.out
    assert record["ops"] == "torch"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{WARNING}{reason}")
    drive(*FLAGS, "--require-native").assert_user_error("error: --require-native: ", reason)


@pytest.mark.slow
def test_the_child_is_asked_once(
    native: Native, drive: Drive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native("right")
    for _ in range(2):
        _, record = answered(drive, tmp_path)
        assert record["ops"] == "native"
    assert len(list((tmp_path / "cache").glob("verdict-*.json"))) == 1
    assert caplog.messages == []


def test_devices_without_native_kernels_are_named(drive: Drive) -> None:
    required = (*FLAGS, "--require-native")
    drive(*required).assert_user_error("--require-native: found cpu, expected GPUs")
    drive(*required, "--ops", "torch").assert_user_error("--require-native: found with --ops torch")
    plan = ("--plan", "--gpu-memory", "80", "--require-native")
    drive(*plan).assert_user_error("--require-native: found together with --gpu-memory")
