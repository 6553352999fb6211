"""Where a record comes from: the commit of this code, or "unknown", but never somebody else's."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from dsv4.measure import provenance


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    return tmp_path


def test_commit_of_the_repository_with_its_changes(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", repository)
    head = git(repository, "rev-parse", "HEAD")
    assert provenance.commit() == head
    (repository / "new").touch()
    assert provenance.commit() == f"{head}+changes"


def test_a_package_inside_another_repository_has_no_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = repository / "site-packages"
    inside.mkdir()
    monkeypatch.setattr(provenance, "ROOT", inside)
    assert provenance.commit() == "unknown"


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance.commit() == "unknown"


def test_spec11_j91_records_name_the_compiler_of_the_kernels() -> None:
    versions = provenance.provenance("a command")["versions"]
    assert versions["nvrtc"] == importlib.metadata.version("nvidia-cuda-nvrtc")
    assert provenance.version_of("no such package") is None
