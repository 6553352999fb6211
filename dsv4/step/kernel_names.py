"""Which kernels the items of a recorded step launch."""

from collections.abc import Iterable

from dsv4.launch.items import Item, Launch, ShapeOf
from dsv4.launch.kernel import Kernel
from dsv4.launch.signature import Signature, signature
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
    """Those of launches for up to ``tokens`` tokens, in steps that are dense and others.

    Raises ``TypeError`` where a launch has kernels of different parameters: it has one list of
    arguments.
    """
    found: set[Kernel] = set()
    asked: set[ShapeOf] = set()
    lengths = _lengths(tokens)
    for launch in (item for item in items if isinstance(item, Launch)):
        shapes = [launch.shape, launch.dense_shape]
        # Launches that are alike share their function.
        if launch.shape_of is not None and launch.shape_of not in asked:
            asked.add(launch.shape_of)
            shapes += map(launch.shape_of, lengths)
        for kernel in {shape.kernel for shape in shapes if shape is not None}:
            _check_parameters(kernel, launch.signature)
            found.add(kernel)
    return found


def _check_parameters(kernel: Kernel, declared: Signature) -> None:
    if kernel.function == declared.kernel:
        return
    if not signature(kernel.source, kernel.function).takes_arguments_of(declared):
        expected = f"those of {declared.kernel}"
        raise TypeError(f"{kernel.function}: found other parameters, expected {expected}")


def _lengths(tokens: int) -> list[int]:
    """Lengths close enough to each other that every kernel is for one of them: the powers of two,
    three steps between them, and the length behind each.
    """
    quarters = [
        quarter << exponent for exponent in range(1, tokens.bit_length()) for quarter in range(4, 8)
    ]
    candidates = {length for quarter in quarters for length in (quarter, quarter + 1)}
    return sorted(length for length in candidates if MAX_DECODE_TOKENS < length <= tokens)
