"""Findings about a checkpoint in one line: counts, and not more of each kind than one can read."""

import pytest

from dsv4.checkpoint.problems import MAX_LISTED, Problems


def found(kind: str, first: int, stop: int) -> Problems:
    problems = Problems()
    for number in range(first, stop):
        problems.add(kind, f"t{number}")
    return problems


def listed(count: int) -> str:
    return ", ".join(f"t{number}" for number in range(count))


@pytest.mark.parametrize("count", [1, MAX_LISTED])
def test_few_findings_are_all_listed(count: int) -> None:
    assert found("missing", 0, count).summary() == f"{count} missing: {listed(count)}"


def test_many_findings_are_counted_and_the_first_are_listed() -> None:
    summary = found("missing", 0, MAX_LISTED + 3).summary()
    assert summary == f"{MAX_LISTED + 3} missing: {listed(MAX_LISTED)} (and 3 more)"


def test_findings_of_two_comparisons_are_counted_together() -> None:
    problems = found("missing", 0, MAX_LISTED - 1)
    problems.extend(found("missing", MAX_LISTED - 1, MAX_LISTED + 20))
    problems.extend(found("unexpected", 0, 1))
    expected = f"{MAX_LISTED + 20} missing: {listed(MAX_LISTED)} (and 20 more); 1 unexpected: t0"
    assert problems.summary() == expected
