"""The README's commands and its library example, as they are written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_rules import DRIVER, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# What is shown of the plan depends on the machine.
SHOWN = re.findall(rf"^\$ python {DRIVER} (--(?:thinking|messages).*)\n((?:.+\n)+)", README, re.M)


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "answer"), SHOWN)
def test_the_driver_answers_as_shown(flags: str, answer: str) -> None:
    arguments = [text.strip('"') for text in re.findall(r'"[^"]*"|\S+', flags)]
    result = run(DRIVER, *arguments, "--quiet")
    assert (result.returncode, result.stdout) == (0, answer)


def test_both_examples_are_found() -> None:
    assert [flags.split()[0] for flags, _ in SHOWN] == ["--thinking", "--messages"]


@pytest.mark.slow
def test_the_library_example_is_complete() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_a_python_without_the_libraries_is_one_line() -> None:
    result = run("-S", "-E", DRIVER)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: \S+ has no torch: `make demo` installs .*\n", result.stderr)
