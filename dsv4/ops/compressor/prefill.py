"""Compressor of 9 and more tokens: one launch pools the windows, a second one stores the tokens in
the ring.
"""

from torch import Tensor

from dsv4.caches.layer import CompressedState
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.compressor.windows import (
    Windows,
    check_windows,
    kernel_defines,
    pool_windows,
    ring_arguments,
)

# The launch copies; no record compares other numbers.
_RING_THREADS = 256


def compress(
    recording: Recording,
    kv_TW: Tensor,
    score_TW: Tensor,
    positions_T: Tensor,
    weights: CompressorWeights,
    state: CompressedState,
) -> None:
    """As ``dsv4.ops.compressor.decode.compress``, for any number of tokens.

    Windows read what the ring held before the step, so a step that is longer than the ring's
    reserve overwrites it only when all of them are done.
    """
    windows = Windows(kv_TW, score_TW, positions_T, weights, state)
    check_windows(windows)
    ratio = weights.ratio
    slots = state.ring.kv.shape[0]
    pool_windows(recording, windows, ratio, store=False)
    kernel = Kernel("compressor/compressor", "compress_ring", kernel_defines(windows, early=False))
    recording.launch(
        by_tokens(_ring_shape, kernel, slots),
        **ring_arguments(windows),
    )


def _ring_shape(kernel: Kernel, slots: int, tokens: int) -> Shape:
    return Shape(kernel, min(tokens, slots), _RING_THREADS, numbers={"count": tokens})
