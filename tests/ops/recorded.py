"""What an op would launch, from a recording on meta tensors: nothing has to be on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target

HOPPER = Target(torch.device("cuda", 0), "sm_90a", 132)
BLACKWELL = Target(torch.device("cuda", 0), "sm_100a", 148)
TARGETS = {"sm_90a": HOPPER, "sm_100a": BLACKWELL}
# Shared memory that a block may ask for, on every architecture of TARGETS.
MOST_SHARED_BYTES = 227 << 10
# Chunks that a recording of the longest one serves, where they are not longer than that.
SHORTER = (9, 10, 100, 129, 511, 512)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(
    op: Callable[..., Any], *arguments: Any, tokens: int, target: Target = HOPPER
) -> list[Launch]:
    """The items that ``op(recording, *arguments)`` writes, all of them launches."""
    recording = Recording(target, tokens)
    op(recording, *arguments)
    found = [item for item in recording.items if isinstance(item, Launch)]
    assert len(found) == len(recording.items)
    return found


def limits_exceeded(shape: Shape) -> list[str]:
    """What of a launch no multiprocessor or driver would take."""
    across, down, deep = shape.grid
    taken = {
        f"{shape.shared_bytes} bytes": shape.shared_bytes <= MOST_SHARED_BYTES,
        f"{shape.threads} threads": 0 < shape.threads <= 1024,
        f"{across} blocks": 0 < across < 1 << 31,
        f"{down} blocks along y": 0 < down < 1 << 16,
        f"{deep} blocks along z": 0 < deep < 1 << 16,
        f"clusters of {shape.cluster}": shape.cluster <= 8 and across % shape.cluster == 0,
    }
    return [what for what, fits in taken.items() if not fits]


def functions(found: Sequence[Launch]) -> list[str]:
    """The names of the kernels in their order."""
    return [launch.shape.kernel.function for launch in found]


def assert_serves_shorter_chunks(record: Callable[[int], list[Launch]], most: int) -> None:
    """``record(tokens)``: the launches of a recording for chunks of up to that many tokens.

    Those of the longest one, asked for fewer tokens, are what a recording for these would hold.
    """
    longest = record(most)
    for tokens in (count for count in SHORTER if count <= most):
        exact = record(tokens)
        assert [shape_at(launch, tokens) for launch in longest] == [
            launch.shape for launch in exact
        ], tokens
        assert list(map(numbers, longest)) == list(map(numbers, exact)), tokens


def shape_at(launch: Launch, tokens: int) -> object:
    """Of a launch for a step of this many tokens."""
    return launch.shape if launch.shape_of is None else launch.shape_of(tokens)


def numbers(launch: Launch) -> dict[str, int | float]:
    """The arguments that are no tensors and do not go with the shape."""
    return {
        name: value for name, value in launch.arguments.items() if isinstance(value, int | float)
    }
