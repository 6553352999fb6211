"""Which kernels the items of a recorded step launch."""

from collections.abc import Iterable

from dsv4.launch.items import Item, Launch
from dsv4.launch.kernel import Kernel
from dsv4.limits import MAX_DECODE_TOKENS

# The name of a recording's call in lists of kernels.
CALL = "(torch or CuTe DSL)"


def kernel_name(item: Item, tokens: int, dense: bool) -> str | None:
    """None where nothing is launched for this many tokens; a call is named ``CALL``."""
    if not isinstance(item, Launch):
        return CALL
    shape = item.shape_for(tokens, dense)
    return None if shape is None else shape.kernel.function


def kernels_of(items: Iterable[Item], tokens: int) -> set[Kernel]:
    """Those of launches for up to ``tokens`` tokens, in steps that are dense and others."""
    launches = [item for item in items if isinstance(item, Launch)]
    shapes = [shape for launch in launches for shape in (launch.shape, launch.dense_shape)]
    # Launches that are alike share their function.
    lengths = _lengths(tokens)
    for shape_of in {launch.shape_of for launch in launches}:
        if shape_of is not None:
            shapes += map(shape_of, lengths)
    return {shape.kernel for shape in shapes if shape is not None}


def _lengths(tokens: int) -> list[int]:
    """Lengths close enough to each other that every kernel is for one of them: the powers of two,
    three steps between them, and the length behind each.
    """
    quarters = [
        quarter << exponent for exponent in range(1, tokens.bit_length()) for quarter in range(4, 8)
    ]
    candidates = {length for quarter in quarters for length in (quarter, quarter + 1)}
    return sorted(length for length in candidates if MAX_DECODE_TOKENS < length <= tokens)
