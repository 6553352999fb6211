"""``bench engine``: flags that mean nothing are refused, those of a checkpoint reach its engine."""

import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.bench import __main__ as bench
from dsv4.bench import checkpoint
from dsv4.bench.__main__ import build_parser, main, measure
from dsv4.bench.checkpoint import CheckpointRun
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "8"], "--prompts: found with --model, expected only with --geometry"),
        (["--positions", "8"], "--positions: found with --model"),
        (["--layers", "2"], "--layers: found with --model"),
        (["--format", "native"], "--format: found with --model"),
        (["--geometry", "v4-pro", "--device", "cuda"], "--device: found with --geometry"),
        (["--geometry", "v4-pro", "--prompt-tokens", "9"], "--prompt-tokens: found with --geom"),
        (["--geometry", "v4-pro", "--repeats", "1"], "--repeats: found with --geometry"),
        (["--device", "cpu", "--gpus", "2"], "--gpus: found 2, expected 1"),
        (["--device", "cpu", "--modes", "full"], "--modes: found 'full' with the torch ops"),
        (["--device", "cpu", "--profile"], "--profile: found with the torch ops"),
        (["--device", "cpu", "--ops", "cutedsl"], "--ops: found 'cutedsl' on the CPU, expected"),
        (["--decode-tokens", "1"], "--decode-tokens: found '1', expected an integer from 2"),
        (["--decode-tokens", "0"], "--decode-tokens: found '0'"),
        (["--repeats", "0"], "--repeats: found '0'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_that_means_nothing_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_record_is_no_file_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert main(["engine", "--model", str(tmp_path), "--out", str(config)]) == 2
    assert "config.json: found the file of --model, expected another" in capsys.readouterr().err
    assert config.read_text() == "{}"


def test_the_record_is_kept_where_nobody_reads_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench, "measure", lambda _: {"found": 7})
    monkeypatch.setattr(sys.stdout, "write", refuse)
    out = tmp_path / "record.json"
    assert main(["ops", "--out", str(out)]) == 2
    assert json.loads(out.read_text())["result"] == {"found": 7}


def test_stdout_as_the_file_of_the_record_has_it_once(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda _: {"found": 7})
    assert main(["ops", "--out", "-"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["result"] == {"found": 7}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gone"], "--model: gone: no such folder"),
        (
            ["--prompt-tokens", "8065"],
            "--prompt-tokens: found 8065 with --decode-tokens 64, expected at most 8064\n",
        ),
        (
            ["--decode-tokens", "8000"],
            "--prompt-tokens: found 512 with --decode-tokens 8000, expected at most 128\n",
        ),
        (["--decode-tokens", "8128"], "--decode-tokens: found 8128, expected at most 8127\n"),
    ],
)
def test_what_the_model_lacks_is_refused_before_any_process_starts(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkpoint.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert main(["engine", "--device", "cpu", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_flags_of_a_checkpoint_reach_the_engine_and_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[CheckpointRun] = []
    calls: list[list[str]] = []

    def measured(run: CheckpointRun, _: Any) -> dict[str, Any]:
        runs.append(run)
        return {}

    def called(command: list[str], **_: Any) -> Any:
        calls.append(command[2:])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(checkpoint, "bench_checkpoint", measured)
    monkeypatch.setattr(checkpoint.subprocess, "run", called)
    flags = ["--gpus", "2", "--parallel", "round-robin", "--prefill-chunk", "64", "--profile"]
    arguments = ["engine", "--model", str(CHECKPOINT), *flags, "--modes", "full", "--repeats", "1"]
    measure(build_parser().parse_args(arguments))
    (run,) = runs
    expected_engine = EngineConfig(gpus=2, parallel="round-robin", prefill_chunk=64, draft="off")
    assert run.engine == expected_engine
    assert (run.model, run.modes, run.profile) == (CHECKPOINT, ("full",), True)
    expected = (
        f"--model {CHECKPOINT} --device auto --gpus 2 --parallel round-robin --ops auto "
        "--prefill-chunk 64 --prefill-activations bf16 --draft off --max-tokens 1 --quiet"
    )
    # The second run has no kernel cache.
    assert [" ".join(call) for call in calls] == [expected] * 2


@pytest.mark.slow
def test_the_demo_is_measured_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "demo.json"
    flags = ["--device", "cpu", "--prompt-tokens", "32", "--decode-tokens", "4", "--repeats", "2"]
    assert main(["engine", *flags, "--prefill-chunk", "16", "--out", str(out)]) == 0
    capsys.readouterr()
    result = json.loads(out.read_text())["result"]
    assert list(result["decode"]) == ["eager"]
    assert result["decode"]["eager"]["ms_per_token"] > 0
    assert (result["prefill_chunk"], result["placement"]["layers"]) == (16, {"cpu": 6})
    assert result["process_start_to_first_token_seconds"] > 0


@pytest.mark.slow
def test_a_driver_that_fails_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    assert main(["engine", "--device", "cpu", "--model", str(tmp_path)]) == 2
    assert "the driver failed: " in capsys.readouterr().err
