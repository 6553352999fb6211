"""``dsv4 COMMAND``: every command by its name."""

import subprocess
import sys
import tomllib
from functools import partial
from importlib import import_module

import pytest

import dsv4
from dsv4.__main__ import COMMANDS, VALIDATIONS, choose, main, program
from tests.source_rules import ROOT

QUESTION = ["--prompt", "What is the capital of France?", "--max-tokens", "3", "--quiet"]


def test_help_names_every_command_and_imports_no_torch() -> None:
    code = "import sys, dsv4.__main__ as m; m.main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []


def test_the_checks_of_validate_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-h"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in VALIDATIONS if f"\n  {name} " not in shown] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "dsv4: found no command, expected one of run, "),
        (["rum"], "dsv4: found the command 'rum', expected one of run, "),
        (["validate"], "dsv4 validate: found no command, expected one of cosine, "),
        (["validate", "run"], "dsv4 validate: found the command 'run', expected one of cosine, "),
        (["run", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["plan", "--seed", "1"], "--seed: found together with --plan"),
        (["validate", "cosine", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["export", "a"], "the following arguments are required: DST"),
        (["bench", "load", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_every_name_leads_to_a_command() -> None:
    modules = [one.module for one in (*COMMANDS.values(), *VALIDATIONS.values()) if one.module]
    assert [name for name in modules if not callable(import_module(name).main)] == []


@pytest.mark.parametrize(
    ("words", "module", "passed"),
    [
        (["run", "--quiet"], "single_shot_inference", ["--quiet"]),
        (["plan", "--gpus", "2"], "single_shot_inference", ["--plan", "--gpus", "2"]),
        (["serve", "-h"], "dsv4.serve.command", ["-h"]),
        (["validate", "layers", "--layers", "1"], "dsv4.validate.layers", ["--layers", "1"]),
        (["bench", "ops"], "dsv4.bench.__main__", ["ops"]),
    ],
)
def test_flags_are_passed_on(words: list[str], module: str, passed: list[str]) -> None:
    chosen = choose(words)
    assert isinstance(chosen, partial)
    assert chosen.args == (module, passed)


@pytest.mark.slow
def test_run_is_the_driver() -> None:
    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-m", "dsv4", "run", *QUESTION) == run("single_shot_inference.py", *QUESTION)


def test_the_console_command_is_this_program() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["dsv4"].partition(":")
    assert getattr(import_module(module), name) is program


def test_the_public_names_are_there_and_no_others() -> None:
    assert [name for name in dsv4.__all__ if getattr(dsv4, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="'dsv4' has no attribute 'Motor'"):
        dsv4.Motor  # noqa: B018
