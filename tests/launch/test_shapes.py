"""Shapes by the number of tokens: computed once for the launches that are alike."""

import pytest

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.shapes import by_tokens
from tests.ranks.planned_ranks import planned_ranks

KERNEL = Kernel("norm/rms_norm", "rms_norm")


def shape(kernel: Kernel, threads: int, tokens: int) -> Shape:
    return Shape(kernel, tokens, threads)


def test_equal_constants_have_their_shapes_in_common() -> None:
    first = by_tokens(shape, KERNEL, 32)
    again = by_tokens(shape, Kernel(KERNEL.source, KERNEL.function), 32)
    other = by_tokens(shape, KERNEL, 64)
    assert first(7) == Shape(KERNEL, 7, 32)
    assert again(7) is first(7)
    assert other(7) == Shape(KERNEL, 7, 64)
    assert [first(tokens) for tokens in (1, 2, 3, 4, 5, 6, 1)] == [
        Shape(KERNEL, tokens, 32) for tokens in (1, 2, 3, 4, 5, 6, 1)
    ]


def test_the_lengths_of_chunks_and_of_what_is_behind_them_are_remembered() -> None:
    """A prompt has chunks of one length and a last one of another."""
    asked = []

    def counted(threads: int, tokens: int) -> Shape:
        asked.append(tokens)
        return Shape(KERNEL, tokens, threads)

    shapes = by_tokens(counted, 32)
    for _ in range(3):
        for tokens in (512, 100):
            assert shapes(tokens) == Shape(KERNEL, tokens, 32)
    assert asked == [512, 100]


@pytest.mark.parametrize("limit", [1, 2, 100, 128, 8191, 8192])
def test_the_longest_shape_is_looked_for_in_few_steps(limit: int) -> None:
    """Of a launch for up to so many tokens: once for all layers, and not token by token."""
    asked = []

    def short(most: int, tokens: int) -> Shape | None:
        asked.append(tokens)
        return Shape(KERNEL, tokens, 32) if tokens <= most else None

    shapes = by_tokens(short, limit)
    assert shapes.longest(8192) == shapes.longest(8192) == Shape(KERNEL, limit, 32)
    assert len(asked) < 20


def test_the_longest_shape_of_a_part_or_of_none() -> None:
    def between(first: int, last: int, tokens: int) -> Shape | None:
        return Shape(KERNEL, tokens, 32) if first <= tokens <= last else None

    assert by_tokens(between, 50, 60).longest(8192) == Shape(KERNEL, 60, 32)
    assert by_tokens(between, 50, 60).longest(49) is None
    whole = by_tokens(between, 1, 300)
    assert [whole.longest(most) for most in (200, 400)] == [
        Shape(KERNEL, 200, 32),
        Shape(KERNEL, 300, 32),
    ]


def test_layers_and_ranks_have_their_shapes_in_common() -> None:
    """Only what a rank has of the tokens is its own: the kernels of the seams."""
    launches = [
        item
        for rank in planned_ranks("v4-flash", 2)
        for recording in rank.record(512).recordings.values()
        for item in recording.items
        if isinstance(item, Launch) and item.shape_of is not None
    ]
    functions: dict[str, set[int]] = {}
    for item in launches:
        functions.setdefault(item.signature.kernel, set()).add(id(item.shape_of))
    assert len(launches) > 300
    assert sum(len(found) for found in functions.values()) < 80
    assert len(functions["prefill_gate_up"]) == len(functions["long_gate_up"]) == 1
    assert len(functions["attention_prefill_few_sm90"]) == 1
    assert len(functions["sum_ranks"]) == 2
