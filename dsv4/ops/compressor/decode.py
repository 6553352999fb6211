"""Compressor of 1 to 8 tokens: one launch pools the windows and stores the tokens in the ring."""

from torch import Tensor

from dsv4.caches.layer import CompressedState
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.compressor.windows import Windows, check_windows, pool_windows


def compress(
    recording: Recording,
    kv_TW: Tensor,
    score_TW: Tensor,
    positions_T: Tensor,
    weights: CompressorWeights,
    state: CompressedState,
) -> None:
    """``dsv4.ops.compressor.compress``, whether a window is complete decided on the device.

    kv and score are float32 ``[T, W]`` and may be columns of wider tensors. A window is pooled the
    same way however its tokens were fed. Rows beyond the cache are dropped. Raises ``ValueError``
    for another dtype, shape or layout, for a ring without room for the longest decode step, and for
    more tokens than such a step has.
    """
    windows = Windows(kv_TW, score_TW, positions_T, weights, state)
    check_windows(windows)
    tokens = kv_TW.shape[0]
    if tokens > MAX_DECODE_TOKENS:
        raise ValueError(f"kv_TW: found {tokens} tokens, expected at most {MAX_DECODE_TOKENS}")
    # A window per token, because the blocks of a window store one, too.
    pool_windows(recording, windows, 1, store=True)
