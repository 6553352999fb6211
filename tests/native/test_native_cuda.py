"""Native kernels on a GPU: Hopper's own products stand for them, and faults of a real device."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from dsv4 import Engine
from dsv4.errors import UserError
from dsv4.native import run_checks, verdict_file
from dsv4.native.check import Verdict
from dsv4.native.form import NativeForm
from dsv4.parallel import devices
from tests.decode.demo import PROMPTS, load
from tests.native import fakes_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
GPU = torch.device("cuda", 0)
# Opening a context and compiling take seconds.
STEP_SECONDS = 60.0


def verdict(checks: str) -> Verdict:
    return run_checks.run_checks(f"{fakes_cuda.__name__}:{checks}", GPU, STEP_SECONDS)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wgmma is Hopper's",
)
def test_products_of_two_kernels_pass_all_checks() -> None:
    found = verdict("hopper")
    assert found.complaint is None
    assert len(found.results) > 40


def test_quantisers_pass_all_checks() -> None:
    found = verdict("quantisers")
    assert found.complaint is None
    assert len(found.results) == 15


@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        ("portable_twice", "the portable kernel takes its place"),
        ("wrong", "values are wrong, at (0, 191) found 0"),
        ("spinning", "no answer within 60 s"),
        ("asserting", "device-side assert"),
        ("refused", "CUDA_ERROR_INVALID_VALUE at a launch of hc_post"),
    ],
)
def test_faults_of_the_device_end_in_the_child(checks: str, reason: str) -> None:
    complaint = verdict(checks).complaint
    assert complaint is not None
    assert complaint.startswith("fake_gemm (")
    assert reason in complaint
    assert float(torch.ones(1000, device=GPU).sum()) == 1000


def native_engine(
    form: NativeForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: bool
) -> Engine:
    monkeypatch.setattr(devices, "native_form", lambda engine: form)
    limited = partial(run_checks.run_checks, step_seconds=STEP_SECONDS)
    monkeypatch.setattr(verdict_file, "run_checks", limited)
    monkeypatch.setattr(verdict_file, "cache_folder", lambda: tmp_path)
    return load(**settings)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (fakes_cuda.form("wrong"), "fake_gemm (linear bf16"),
        (fakes_cuda.form("spinning"), "fake_gemm (large): no answer within 60 s"),
        (fakes_cuda.form("refused"), "fake_gemm (large): RuntimeError: CUDA driver error"),
        (fakes_cuda.form("passing", fakes_cuda.faulty(fakes_cuda.lose_a_column)), "linear "),
        (fakes_cuda.form("passing", fakes_cuda.faulty(fakes_cuda.fail)), "linear "),
    ],
    ids=["wrong", "hang", "launch error", "wrong on the weights", "error on the weights"],
)
def test_a_fault_leaves_the_portable_answer_and_one_warning(
    form: NativeForm,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = PROMPTS["recall_128"]
    portable = load(ops="cuda").prefill(prompt)
    with caplog.at_level(logging.WARNING, "dsv4"):
        engine = native_engine(form, tmp_path, monkeypatch)
    told = [line for line in caplog.messages if line.startswith("no native kernels")]
    assert len(told) == 1
    assert told[0].startswith(f"no native kernels, the portable ones are used: {reason}")
    assert engine.table.portable is None
    assert torch.equal(engine.prefill(prompt), portable)
    with pytest.raises(UserError, match="^EngineConfig.require_native: "):
        native_engine(form, tmp_path, monkeypatch, require_native=True)


def test_kernels_that_passed_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native_engine(fakes_cuda.form("passing"), tmp_path, monkeypatch, require_native=True)
    assert engine.table.portable is not None
    assert bool(engine.prefill(PROMPTS["recall_128"]).isfinite().all())
