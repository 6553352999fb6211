"""Shapes by the number of tokens: computed once for the launches that are alike."""

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
    assert len(functions["prefill_gate_up"]) == 2
    assert len(functions["attention_prefill_sm90"]) == 1
    assert len(functions["sum_ranks"]) == 2
