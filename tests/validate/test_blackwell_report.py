"""The report: the same sections on every machine, a reason for what is missing, and nothing that
tells whose machine it was.
"""

import getpass
import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dsv4.bench.__main__ as bench
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import evaluate
from dsv4.engine_config import ACTIVATION_MODES
from dsv4.errors import UserError
from dsv4.native.check import Result, Verdict
from dsv4.validate import blackwell_report, cosine, exchange, graph_readiness, layer_flags
from dsv4.validate.anonymous import Anonymiser
from dsv4.validate.blackwell_report import Machine, main, parse, sections
from dsv4.validate.device_clocks import summaries
from dsv4.validate.report_section import Finding, Section, command_section
from tests.native import fakes

STUB = "tests.validate.stub_command"
BLACKWELL = Machine(8, frozenset(ACTIVATION_MODES))
MACHINES = [Machine(0, frozenset()), Machine(1, frozenset()), BLACKWELL]


def run(line: str, limit_seconds: float = 60.0) -> Finding:
    return command_section("x", f"{STUB} {line}", "--json", limit_seconds).run()


def test_a_record_loses_its_provenance() -> None:
    assert run("0 record") == Finding("done", None, {"flag": "--json", "ms": 1.5})


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ("1 record", "failed", "the check does not hold"),
        ("2 nothing", "failed", "some line"),
        ("2 --model:_no_such_folder", "failed", "--model: no such folder"),
        ("2 memory:_cuda:0_needs_12_MiB", "skipped", "memory: cuda:0 needs 12 MiB"),
        ("3 nothing", "failed", "some line"),
    ],
)
def test_what_ends_a_section(line: str, status: str, reason: str) -> None:
    finding = run(line)
    assert (finding.status, finding.reason) == (status, reason)
    assert (finding.result is None) == ("nothing" in line)


def test_a_section_that_hangs_ends_at_its_limit() -> None:
    assert run("0 hangs", 0.3) == Finding("failed", "not done within 0.3 s", None)


def names(machine: Machine, dry: bool) -> list[str]:
    return [section.name for section in sections(machine, dry)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dry", [False, True])
def test_every_machine_has_the_same_sections(machine: Machine, dry: bool) -> None:
    found = names(machine, dry)
    assert found == names(MACHINES[0], False)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dry", [False, True])
def test_commands_take_the_flags(monkeypatch: pytest.MonkeyPatch, dry: bool) -> None:
    lines: list[list[str]] = []

    def note(name: str, line: str, flag: str, limit_seconds: float) -> Section:
        lines.append([*line.split(), flag, "record.json"])
        return Section(name, lambda: Finding("done", None, None))

    monkeypatch.setattr(blackwell_report, "command_section", note)
    assert len(list(sections(BLACKWELL, dry))) == len(lines) + len(ACTIVATION_MODES)
    parsers = {
        "dsv4.bench": bench.build_parser().parse_args,
        "dsv4.validate.cosine": cosine.build_parser().parse_args,
        "dsv4.validate.layers": partial(layer_flags.parse, description=None),
        "dsv4.validate.exchange": exchange.build_parser().parse_args,
        "dsv4.validate.graph_readiness": graph_readiness.build_parser().parse_args,
        "dsv4.demo.training.evaluate": evaluate.parse,
    }
    for module, *arguments in lines:
        parsers[module](arguments)
    assert {module for module, *_ in lines} == set(parsers)


def test_verdicts_are_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict((Result("small", "gemm", "failed", "12 values are wrong"),))
    asked: list[bool] = []

    def verdict_for(checks: str, device: object, anew: bool) -> Verdict:
        asked.append(anew)
        return verdict

    form = fakes.form()
    monkeypatch.setattr(blackwell_report, "verdict_for", verdict_for)
    monkeypatch.setattr(blackwell_report, "NATIVE_FORMS", {"bf16": form})
    found = blackwell_report._verdict(form, fakes.CPU)
    assert (found.status, found.reason) == ("failed", "gemm (small): 12 values are wrong")
    assert found.result == [
        {"check": "small", "kernel": "gemm", "outcome": "failed", "reason": "12 values are wrong"}
    ]
    assert asked == [True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open /home/ada/x.py: gone", "open <path>: gone"),
        ('File "/usr/lib/a.py", line 3', 'File "<path>", line 3'),
        ("~/models/x and ./y/z, a/b", "<path> and ./y/z, a/b"),
        ("ada on vm7, vm7.example.org, adapter", "<user> on <host>, <host>, adapter"),
        ("4800 GB/s, 3/4 of dsv4/ops, tok/s", "4800 GB/s, 3/4 of dsv4/ops, tok/s"),
        ("cuda:0 (NVIDIA B200)", "cuda:0 (NVIDIA B200)"),
    ],
)
def test_texts_become_anonymous(text: str, expected: str) -> None:
    names = {"ada": "<user>", "vm7": "<host>", "vm7.example.org": "<host>", "": "<none>"}
    anonymous = Anonymiser(names)
    assert anonymous(text) == expected
    assert anonymous({"a": [text, 3, None], text: 1.5}) == {"a": [expected, 3, None], expected: 1.5}


def test_clocks_are_summed_up_by_gpu() -> None:
    lines = "0, 1980, 2619, 100.5, 40\n1, 345, 2619, [N/A], 35\n0, 1200, 2619, 300, 50\n0, 15"
    first, second = summaries(lines)
    assert first["clocks.sm"] == {"least": 1200, "median": 1590, "largest": 1980}
    assert first["power.draw"]["largest"] == 300
    assert second.keys() == {"clocks.sm", "clocks.mem", "temperature.gpu"}
    assert summaries("") == []


def texts(value: Any) -> Iterator[str]:
    """Every text of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


def test_the_report_replaces_no_file_of_the_demo() -> None:
    with pytest.raises(UserError, match=r"--json: .*: found the file of the demo, expected"):
        parse(["--json", str(CHECKPOINT / "config.json")])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_tells_everything_but_whose_machine_it_was(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["--dry-run", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["dry_run"]
    assert [section["name"] for section in report["sections"]] == names(MACHINES[0], True)
    for section in report["sections"]:
        assert section.keys() == {"name", "status", "reason", "result", "seconds", "clocks"}
        assert section["status"] in ("done", "skipped")
        assert (section["reason"] is None) == (section["status"] == "done")
        assert (section["result"] is None) == (section["status"] == "skipped")
    assert {section["name"] for section in report["sections"] if section["status"] == "done"} >= {
        *("demo on 1 GPU", "layers bf16", "layers fp8", "layers nvfp4"),
        *("cosine bf16", "cosine fp8", "cosine nvfp4"),
        *("evaluation bf16", "evaluation fp8", "evaluation nvfp4"),
    }
    hidden = {socket.gethostname(), getpass.getuser(), Path.home().name, str(tmp_path)}
    for text in texts(report):
        assert not re.search(r"(^|[\s\"'=(\[])~?/\w", text), text
        assert hidden.isdisjoint(re.split(r"[\s:,/]+", text)), text
