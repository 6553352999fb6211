"""The file of ``--json`` is JSON, whatever was measured."""

import argparse
import json
import math
from pathlib import Path

import pytest

import dsv4.bench.__main__ as bench
from dsv4.errors import UserError
from dsv4.measure.record_file import parse_recorded, write_record


def refused(constant: str) -> None:
    pytest.fail(f"found {constant}, which is no JSON")


def test_numbers_that_json_does_not_have_are_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    found = {"rows": [{"cosine": math.nan, "error": math.inf, "worst_token": 0.1 + 0.2}], "é": None}
    write_record(path, "dsv4.validate.cosine", ["--json", str(path)], found)
    written = json.loads(path.read_text(encoding="utf-8"), parse_constant=refused)
    assert written["command"] == f"python -m dsv4.validate.cosine --json {path}"
    assert written["rows"] == [{"cosine": "NaN", "error": "Infinity", "worst_token": 0.1 + 0.2}]
    assert written["é"] is None


def test_the_record_replaces_no_file_of_the_model(tmp_path: Path) -> None:
    arguments = ["--model", str(tmp_path), "--json", str(tmp_path / "config.json")]
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    with pytest.raises(UserError, match=r"--json: .*: found the file of --model, expected"):
        parse_recorded(parser, arguments)


def test_so_are_those_of_a_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda _: [math.nan, -math.inf])
    assert bench.main(["ops"]) == 0
    written = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert written["result"] == ["NaN", "-Infinity"]
