"""Which kernels the items of a recorded step launch."""

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


def kernels_of(launch: Launch, tokens: int) -> set[Kernel]:
    """Those of a launch for up to ``tokens`` tokens, in steps that are dense and others."""
    shapes = [launch.shape, launch.dense_shape]
    if launch.shape_of is not None:
        shapes += map(launch.shape_of, _lengths(tokens))
    return {shape.kernel for shape in shapes if shape is not None}


def _lengths(tokens: int) -> list[int]:
    """Lengths around the powers of two, where kernels change."""
    powers = [1 << exponent for exponent in range(3, tokens.bit_length() + 1)]
    candidates = {length for power in powers for length in (power, power + 1)}
    return sorted(length for length in candidates if MAX_DECODE_TOKENS < length <= tokens)
