"""What a manifest says of packed weights may be any JSON, in one whose SHA-256 is right too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4.checkpoint.packed_cache import MANIFEST
from tests.checkpoint.packed_starts import Starts, change_body

BAD_VIEWS = {
    "dtype": [0, "F3", [1], [1], 0],
    "beyond": [0, "U8", [1], [1], 2**40],
    "number": ["0", "U8", [1], [1], 0],
    "short": [0, "U8"],
    "text": [0, "U8", "shape", [1], 0],
}


def add_view(view: list[Any]) -> Callable[[dict[str, Any]], None]:
    """Beside what the first weight has, so that the numbers of the memory stay what they were."""

    def change(body: dict[str, Any]) -> None:
        name, value = next(iter(body["ranks"][0].items()))
        body["ranks"][0][name] = {"tuple": [value, {"view": view}]}

    return change


def make_first_weight(kind: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        name, value = next(iter(body["ranks"][0].items()))
        body["ranks"][0][name] = {"class": [kind, value["class"][1]]}

    return change


def spoil_row_list(body: dict[str, Any]) -> None:
    """Nothing fails before its products are computed."""
    kinds = [value["class"] for value in body["ranks"][0].values()]
    fields = next(fields for kind, fields in kinds if kind == "RowList")
    fields["out_dtypes"] = "text"


def replace_first_weight(body: dict[str, Any]) -> None:
    """By what holds the same memory, so that its numbers stay what they were."""
    name, value = next(iter(body["ranks"][0].items()))
    body["ranks"][0][name] = {"tuple": [value]}


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no rank": (lambda body: body.update(ranks=[], checksums=[]), "expected 1 ranks"),
    "ranks that are none": (lambda body: body.update(ranks=[None]), "found AttributeError ("),
    "other fields": (make_first_weight("ListLaunch"), "found TypeError ("),
    "no such class": (make_first_weight("Popen"), "found KeyError ("),
    "field of another kind": (spoil_row_list, "(RowList.out_dtypes is str)"),
    "no weight": (replace_first_weight, "found TypeError (no weight is tuple)"),
    "text": (lambda body: body.update(checksums=["x"] * len(body["checksums"])), "expected 'x'"),
    **{f"view, {name}": (add_view(view), "expected packed w") for name, view in BAD_VIEWS.items()},
}


@pytest.mark.parametrize(("change", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_description_that_means_nothing_is_one_warning_and_mended(
    starts: Starts,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, Any]], object],
    said: str,
) -> None:
    count, expected = starts()
    (entry,) = starts.entries
    change_body(entry / MANIFEST, change)
    again, found = starts()
    assert again == count
    assert torch.equal(found, expected)
    (line,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert "\n" not in line
    assert line.startswith(f"packed cache: {entry}/")
    assert "damaged: " in line
    assert said in line
    assert starts()[0] == 0
