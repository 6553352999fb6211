"""Whatever warp is late, an engine says the same, and nothing waits for ever."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4.demo import DRAFTS
from tests.delays import decoded_digest
from tests.delays.delayed_package import (
    BEGIN,
    MEETINGS,
    PACKAGE,
    delayed,
    sources,
    write_delayed_package,
)
from tests.gpu_counts import gpu_counts

TOKENS = 3000
DRAFTED = {"draft": "dspark", "draft_weights": str(DRAFTS["dspark"]), "draft_tokens": 5}
UNNAMED = DRAFTED.keys() - {"draft"}
SETTINGS: list[dict[str, Any]] = [
    {"cuda_graph": "full"},
    {"cuda_graph": "split"},
    {"cuda_graph": "full", **DRAFTED},
    {"gpus": 2, "cuda_graph": "full"},
    {"gpus": 2, "parallel": "tensor"},
    {"gpus": 2, "parallel": "tensor", "cuda_graph": "full"},
    {"gpus": 2, "parallel": "tensor", "cuda_graph": "full", **DRAFTED},
]


def named(settings: dict[str, Any]) -> Any:
    """For ``pytest.mark.parametrize``."""
    (gpus,) = gpu_counts(settings.get("gpus", 1))
    name = " ".join(str(value) for name, value in settings.items() if name not in UNNAMED)
    return pytest.param(settings, marks=gpus.marks, id=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the delayed package."""
    folder = tmp_path_factory.mktemp("delayed")
    write_delayed_package(folder)
    return folder


def run(folder: Path, program: list[str]) -> str:
    """What a program of the package in this folder prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def digest(folder: Path, settings: dict[str, Any], tokens: int) -> str:
    package, found = run(
        folder, [decoded_digest.__file__, json.dumps(settings), str(tokens)]
    ).split()
    assert Path(package).is_relative_to(folder)
    return found


@pytest.mark.parametrize("meeting", MEETINGS)
def test_every_kind_of_meeting_is_delayed_somewhere(meeting: str) -> None:
    texts = [delayed(path.read_text()) for path in sources(PACKAGE)]
    late = re.compile(rf'random_delay\(\)\) asm volatile\(\s*"{re.escape(meeting)}')
    assert any(map(late.search, texts))


def test_one_header_has_the_delay() -> None:
    assert sum(BEGIN in path.read_text() for path in sources(PACKAGE)) == 1


@pytest.mark.slow
def test_a_delayed_kernel_is_another_one_that_compiles(folder: Path) -> None:
    code = "from dsv4.launch.compiler import compile_source as compile; "
    code += "print(len(compile('channel/channel', 'sm_90a', (('EARLY', 0),)).cubin))"
    assert int(run(folder, ["-c", code])) > int(run(PACKAGE.parent, ["-c", code]))


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [*map(named, SETTINGS)])
def test_an_engine_says_the_same(folder: Path, settings: dict[str, Any]) -> None:
    assert digest(folder, settings, TOKENS) == digest(PACKAGE.parent, settings, TOKENS)
