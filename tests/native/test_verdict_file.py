"""Kept verdicts: asked for once, whole or not at all, never for another machine."""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4.native import verdict_file
from dsv4.native.check import Result, Verdict
from dsv4.native.verdict_file import verdict_facts, verdict_for, verdict_path

CPU = torch.device("cpu")
PASSED = Verdict((Result("small", "gemm", "passed"),))
FAILED = Verdict((Result("small", "gemm", "failed", "12 values are wrong"),))
NO_MEMORY = Verdict((Result("small", "gemm", "not run", "ran out of memory"),))

Asked = Callable[[Verdict], list[str]]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Says what the child process finds from now on; returns the list of the times it was asked."""
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))

    def finds(verdict: Verdict) -> list[str]:
        asked: list[str] = []

        def run(checks: str, device: torch.device) -> Verdict:
            asked.append(checks)
            return verdict

        monkeypatch.setattr(verdict_file, "run_checks", run)
        return asked

    return finds


def kept() -> Path:
    return verdict_path(verdict_facts("m:f", CPU))


@pytest.mark.parametrize("verdict", [PASSED, FAILED])
def test_a_verdict_is_asked_for_once(child: Asked, verdict: Verdict) -> None:
    asked = child(verdict)
    assert verdict_for("m:f", CPU) == verdict
    assert verdict_for("m:f", CPU) == verdict
    assert asked == ["m:f"]
    assert verdict_for("m:g", CPU) == verdict
    assert verdict_for("m:f", CPU, anew=True) == verdict
    assert asked == ["m:f", "m:g", "m:f"]


def test_a_verdict_that_says_nothing_is_not_kept(child: Asked) -> None:
    asked = child(NO_MEMORY)
    for _ in range(2):
        assert verdict_for("m:f", CPU) == NO_MEMORY
    assert len(asked) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"failed"', '"passed"'),
        lambda text: text.replace("12 values", "13 values"),
        lambda text: text.replace('"gpu": "cpu"', '"gpu": "gpu"'),
        lambda text: json.dumps({"facts": json.loads(text)["facts"]}),
    ],
)
def test_a_damaged_file_counts_as_absent(child: Asked, damage: Callable[[str], str]) -> None:
    child(FAILED)
    verdict_for("m:f", CPU)
    text = kept().read_text()
    assert damage(text) != text
    kept().write_text(damage(text))
    asked = child(PASSED)
    assert verdict_for("m:f", CPU) == PASSED
    assert asked == ["m:f"]
    assert verdict_for("m:f", CPU) == PASSED
    assert len(asked) == 1


def test_a_folder_that_cannot_be_written_costs_only_time(
    child: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4_KERNEL_CACHE", "/proc/nothing")
    asked = child(PASSED)
    assert verdict_for("m:f", CPU).passed
    assert verdict_for("m:f", CPU).passed
    assert len(asked) == 2


@pytest.mark.parametrize("fact", ["checks", "gpu", "driver", "packages", "sources"])
def test_every_fact_has_a_file_of_its_own(fact: str) -> None:
    facts = verdict_facts("m:f", CPU)
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert verdict_path({**facts, fact: "another"}) != verdict_path(facts)


def test_changed_sources_need_another_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_file, "_PACKAGE_FOLDER", tmp_path)
    kernel = tmp_path / "ops" / "linear" / "gemm.cu"
    kernel.parent.mkdir(parents=True)
    found = set()
    for text in ("a", "b"):
        kernel.write_text(text)
        found.add(verdict_facts("m:f", CPU)["sources"])
    assert len(found) == 2


def test_the_driver_is_known_by_its_version_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(verdict_file, "_DRIVER_FILE", file)
    assert verdict_file.driver_version() is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  "
        "(builder@host)\nGCC version:  gcc version 14.3.0\n"
    )
    assert verdict_file.driver_version() == "580.159.04"
