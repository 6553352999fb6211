"""What the GPU ops keep with weights and caches between calls."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from dsv4.ops.remembered import layouts, remembered


class Weights:
    """Anything with attributes."""


def counting() -> tuple[list[int], Callable[[], int]]:
    """Calls so far, and a function that returns how many they are."""
    calls: list[int] = []

    def find() -> int:
        calls.append(len(calls))
        return len(calls)

    return calls, find


def test_layouts_are_equal_where_only_values_and_addresses_differ() -> None:
    x = torch.zeros(4, 8)
    assert layouts(x, x) == layouts(torch.ones(4, 8), x.clone())
    assert hash(layouts(x)) == hash(layouts(x.clone()))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(4, 8, device="meta"),
        torch.zeros(8, 4),
        torch.zeros(8, 4).T,
        torch.zeros(33)[1:].view(4, 8),
        torch.zeros(4, 16)[:, :8],
    ],
    ids=["dtype", "device", "shape", "strides", "alignment", "columns"],
)
def test_layouts_tell_apart_what_a_launch_goes_by(other: torch.Tensor) -> None:
    assert layouts(torch.zeros(4, 8)) != layouts(other)


def test_a_result_is_found_once_per_parts_and_key() -> None:
    owner, first, second = Weights(), torch.zeros(2), torch.zeros(2)
    calls, find = counting()
    assert [remembered(owner, (first,), 1, find), remembered(owner, (first,), 1, find)] == [1, 1]
    assert [remembered(owner, (first,), 2, find), remembered(owner, (second,), 1, find)] == [2, 3]
    assert [remembered(Weights(), (first,), 1, find), remembered(owner, (None,), 1, find)] == [4, 5]
    assert len(calls) == 5


def test_functions_do_not_share_what_they_found() -> None:
    owner = Weights()
    assert remembered(owner, (), 1, str, 2) == "2"
    assert remembered(owner, (), 1, float, 2) == 2.0
    assert remembered(owner, (), 1, str, 3) == "2", "arguments are for the first time"


def test_parts_stay_alive_with_the_owner_and_go_with_it() -> None:
    owner, part = Weights(), Weights()
    alive = weakref.ref(part)
    remembered(owner, (part,), 1, lambda: 1)
    del part
    gc.collect()
    assert alive() is not None
    del owner
    gc.collect()
    assert alive() is None


def test_what_raises_is_asked_again() -> None:
    owner = Weights()

    def refuse() -> int:
        raise ValueError("x: found")

    for _ in range(2):
        with pytest.raises(ValueError, match="^x: found"):
            remembered(owner, (), 1, refuse)
    assert remembered(owner, (), 1, lambda: 3) == 3


def test_only_the_latest_layouts_are_kept() -> None:
    owner = Weights()
    for key in range(33):
        remembered(owner, (), key, int, key)
    assert [remembered(owner, (), key, int, -1) for key in (32, 2)] == [32, 2]
    assert remembered(owner, (), 0, int, -1) == -1, "the oldest was dropped and is found again"
