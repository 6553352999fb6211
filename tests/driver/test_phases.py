"""What the driver shows before the first token: reading, packing and prefill."""

import sys
from pathlib import Path

import pytest

from dsv4 import Engine, EngineConfig
from dsv4.command import progress
from tests.driver.drive import Drive


def test_packing_is_reported_to_its_end(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    Engine.load(
        checkpoint,
        EngineConfig(device="cpu", max_context=16),
        packing=lambda done, total: seen.append((done, total)),
    )
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert len(seen) > 10
    assert {total for _, total in seen} == {done[-1]}


def test_reading_is_reported_to_its_end_with_packed_weights_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Of a second start it is the reading of the packed weights; what else is read is little."""
    config = EngineConfig(device="cpu", max_context=16, packed_cache=str(tmp_path / "cache"))
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        seen.clear()
        Engine.load(checkpoint, config, lambda done, total: seen.append((done, total)))
        done = [count for count, _ in seen]
        assert done == sorted(done)
        assert {total for _, total in seen} == {done[-1]}


def test_every_phase_has_its_name_and_begins_before_it_is_over(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.0)
    err = drive("--device", "cpu", "--prompt", "one two", "--max-tokens", 1).err
    lines = err.split(progress.ERASE_LINE)
    for phase in ("read   ", "pack   ", "prefill"):
        drawn = [line for line in lines if line.startswith(phase)]
        assert "100 %" in drawn[-1]
        assert len(drawn) > 1
    assert next(line for line in lines if line.startswith("prefill")).split()[2] == "0"
    assert "━" not in lines[-1]
