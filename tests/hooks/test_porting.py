"""The walk-through of docs/porting.md, run as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_rules import ROOT

BLOCK = re.compile(r"^```(sh|python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """In a folder in which what the page names lies as in the repository."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def row_of(line: str) -> tuple[str, str, str, tuple[str, ...]]:
    """Name, kind and mark of a row, and its numbers where they are shares of choices. Rounding,
    which is another machine's, decides the numbers of other values, how many are under the
    threshold among them.
    """
    name, kind, *rest = line.split()
    numbers, _, mark = " ".join(rest).partition("under")
    choices = name.endswith(("experts", "entries"))
    if not choices:
        return name, kind, mark.partition(":")[0], ()
    return name, kind, mark, tuple(numbers.split())


@pytest.mark.slow
def test_the_walk_through_finds_its_fault(tmp_path: Path) -> None:
    for name in ("dsv4", "docs", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = BLOCK.findall((ROOT / "docs/porting.md").read_text(encoding="utf-8"))
    *steps, (kind, last) = blocks
    assert [step for step, _ in steps] == ["sh", "python", "sh"]
    assert kind == "console"
    for step, text in steps:
        shell = ["bash", "-ec", text] if step == "sh" else [sys.executable, "-c", text]
        result = run(shell, tmp_path)
        assert result.returncode == 0, result.stderr
    command, *shown = last.splitlines()
    result = run(["bash", "-ec", command.removeprefix("$ ")], tmp_path)
    assert result.returncode == 1, result.stderr
    out = result.stdout.splitlines()
    assert out[-1] == shown[-1]
    said = {row_of(line) for line in out}
    assert len(shown) > 4
    assert [line for line in shown[:-1] if line != "..." and row_of(line) not in said] == []
