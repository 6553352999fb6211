"""docs/regressions.md has every row of its lists, every test it names exists, and names of tests
give their rows.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "docs" / "regressions.md"
FIRST_ROWS = {
    "A": 1,
    "B": 6,
    "C": 17,
    "D": 24,
    "E": 30,
    "F": 38,
    "G": 45,
    "H": 48,
    "I": 52,
    "J": 60,
    "end": 96,
}
SECTIONS = {
    section: range(first, end) for (section, first), (_, end) in pairwise(FIRST_ROWS.items())
}
LESSONS = 18
REASONS = ("waits for: ", "wait for: ", "does not apply: ")


def read_rows(text: str) -> dict[str, str]:
    """Row label → the cell with its tests. A label that occurs twice is an error of the table."""
    cells = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if re.match(r"\| [A-JL]\d+ \|", line)
    ]
    assert all(len(cell) == 3 for cell in cells)
    assert len({label for label, _, _ in cells}) == len(cells)
    return {label: tests for label, _, tests in cells}


def named_tests(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py::\w+)`", text)


def missing_tests(text: str) -> list[str]:
    """Named tests that are no function at the top level of their file."""
    wanted = {name: name.partition("::") for name in named_tests(text)}
    functions: dict[str, set[str]] = {}
    for file in {file for file, _, _ in wanted.values()}:
        path = TESTS / file
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        functions[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return [name for name, (file, _, function) in wanted.items() if function not in functions[file]]


def rows_of_name(test: str) -> set[str]:
    """The rows that a test's name carries: test_lesson_09_x is L9, test_spec11_d24_d25_x is D24 and
    D25.
    """
    lessons = {f"L{int(number)}" for number in re.findall(r"_lesson_?(\d+)(?=_)", test)}
    reported = re.search(r"_spec11((?:_[a-j]\d+)+)(?=_)", test)
    rows = [] if reported is None else re.findall(r"([a-j])(\d+)", reported[1])
    return lessons | {f"{section.upper()}{int(number)}" for section, number in rows}


def outside_their_rows(rows: dict[str, str], tests: dict[str, str]) -> list[str]:
    """Tests (file by name) with a row in their name whose cell does not list them."""
    return [
        f"{row}: {test}"
        for test, file in tests.items()
        for row in sorted(rows_of_name(test))
        if f"`{file}::{test}`" not in rows.get(row, "")
    ]


@pytest.fixture(scope="module")
def document() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_every_row_of_the_lists_is_there(document: str) -> None:
    lessons = [f"L{lesson}" for lesson in range(1, LESSONS + 1)]
    reported = [f"{section}{row}" for section, rows in SECTIONS.items() for row in rows]
    assert list(read_rows(document)) == lessons + reported


def test_every_row_names_a_test_or_says_why_not(document: str) -> None:
    rows = read_rows(document)
    reasons = {row: any(reason in cell.lower() for reason in REASONS) for row, cell in rows.items()}
    assert [row for row, cell in rows.items() if not named_tests(cell) and not reasons[row]] == []


def test_every_named_test_exists(document: str) -> None:
    assert missing_tests(document) == []


def test_every_test_is_in_the_rows_of_its_name(document: str) -> None:
    tests: dict[str, str] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        names = re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        tests |= {name: file.relative_to(TESTS).as_posix() for name in names if rows_of_name(name)}
    assert len(tests) > 100
    assert outside_their_rows(read_rows(document), tests) == []


def test_a_test_outside_its_row_is_noticed() -> None:
    assert rows_of_name("test_spec11_d24_d25_x") == {"D24", "D25"}
    assert rows_of_name("test_spec11_a01_lesson_02_x") == {"A1", "L2"}
    assert rows_of_name("test_spec11_c20_e2m1_ties") == {"C20"}
    assert rows_of_name("test_spec11_j66_j67_x") == {"J66", "J67"}
    assert rows_of_name("test_lesson07_x") == {"L7"}
    assert outside_their_rows({"C20": "`a.py::test_x`"}, {"test_spec11_c20_y": "a.py"}) == [
        "C20: test_spec11_c20_y"
    ]


def test_a_renamed_test_is_noticed() -> None:
    assert missing_tests("`test_regressions_doc.py::test_a_renamed_test_is_noticed`") == []
    assert missing_tests("`test_regressions_doc.py::test_gone` `gone.py::test_x`") == [
        "test_regressions_doc.py::test_gone",
        "gone.py::test_x",
    ]
