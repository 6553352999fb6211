"""Records of measurements: those that documents quote exist, and name a commit or are listed."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
LIST = RECORDS / "README.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# By the folder, or by how the names of records begin; * stands for several of them.
QUOTED = re.compile(
    r"(?:benchmarks/|\b(?=demo_|engine_|ops_|kernel_rounds|step_rounds|graph_readiness))"
    r"([\w.*-]+\.(?:json|svg|txt))"
)
COMMIT = re.compile(r"[0-9a-f]{40}")


def quoted(text: str) -> set[str]:
    """Names of records in a text, with * as it stands there."""
    return set(QUOTED.findall(text))


def missing(names: set[str]) -> list[str]:
    return sorted(name for name in names if not any(RECORDS.glob(name)))


def listed(text: str) -> set[str]:
    """Names in the first column of the table of records without a commit of their own."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.-]+)`", row)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_record_that_a_document_quotes_exists(document: Path) -> None:
    assert missing(quoted(document.read_text(encoding="utf-8"))) == []


def test_every_record_is_quoted() -> None:
    names = {
        name
        for document in DOCUMENTS
        if document != LIST
        for name in quoted(document.read_text(encoding="utf-8"))
    }
    found = {record.name for name in names for record in RECORDS.glob(name)}
    assert {record.name for record in RECORDS.glob("*.json")} - found == set()


def test_records_come_from_a_commit_or_are_listed() -> None:
    unclean = {
        record.name
        for record in RECORDS.glob("*.json")
        if not COMMIT.fullmatch(json.loads(record.read_text(encoding="utf-8"))["commit"])
    }
    assert unclean == listed(LIST.read_text(encoding="utf-8"))


def test_a_missing_record_is_noticed() -> None:
    names = quoted("[x](docs/benchmarks/nothing.json), `engine_*.svg`, ops_h300.json, config.json")
    assert missing(names) == ["nothing.json", "ops_h300.json"]
    assert listed("| `a.json`, `b.json` | `0d9d111` | text |\n`c.json`") == {"a.json", "b.json"}
