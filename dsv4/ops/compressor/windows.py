"""What both forms of ``compress`` share: their arguments as one value, the checks, and the launch
over windows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, history_tokens
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.config import CSA_RATIO
from dsv4.integers import ceil_div
from dsv4.launch.checks import expect, expect_rows
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.key_rows import check_rows, row_code

# 128 registers a thread, which the rows of 16 tokens nearly fill (docs/kernels/compressor.md).
THREADS = 512
# Blocks of a window form a cluster, of at most 8; 64 channels of an fp8 row have one scale.
_MOST_BLOCKS = 8
_BLOCK_CHANNELS = 64
# Threads that share the tokens of a window: 8 groups for the 128 of HCA, 4 for the 8 of CSA where
# the row is so narrow that threads would be idle.
_HCA_GROUPS = 8
_CSA_GROUPS = 4
# A block keeps a row and two values per thread in the 48 KiB that need no asking.
_WIDEST_ROW = (48 << 10) // 4 - 2 * THREADS


class Split(NamedTuple):
    """``blocks`` share the channels of a window, ``groups`` of threads its tokens."""

    blocks: int
    groups: int


class Windows(NamedTuple):
    """See ``dsv4.ops.compressor.compress``."""

    kv_TW: Tensor
    score_TW: Tensor
    positions_T: Tensor
    weights: CompressorWeights
    state: CompressedState


def split(weights: CompressorWeights, rows: RowCache) -> Split:
    """How a window of these rows is pooled."""
    if weights.ratio == CSA_RATIO:
        return Split(1, _CSA_GROUPS if rows.width <= THREADS // _CSA_GROUPS else 1)
    blocks, rest = divmod(rows.width, _BLOCK_CHANNELS)
    whole_row = weights.rotate_keys or rows.format is RowFormat.INDEX_FP8
    return Split(1 if rest or blocks > _MOST_BLOCKS or whole_row else blocks, _HCA_GROUPS)


def kernel_defines(windows: Windows, early: bool) -> Defines:
    """What compressor.cu is compiled with. ``early``: tokens before the step are read in front of
    the wait.
    """
    weights = windows.weights
    rows = windows.state.rows
    blocks, groups = split(weights, rows)
    return (
        ("RATIO", weights.ratio),
        ("GROUPS", groups),
        ("BLOCKS", blocks),
        ("WIDTH", rows.width),
        ("ROPE", 2 * weights.inv_freq.shape[0]),
        ("FORMAT", row_code(rows)),
        ("EARLY", int(early)),
        ("SHARED_BYTES", 4 * (rows.width // blocks + (2 * THREADS if groups > 1 else 0))),
    )


def pool_windows(
    recording: Recording, windows: Windows, tokens_per_window: int, store: bool
) -> None:
    """Records the kernel over a window for every ``tokens_per_window`` tokens: as many as a step
    may complete.

    ``store``: the blocks of the nth window put the nth token in the ring, so there are as many.
    """
    weights = windows.weights
    rows = windows.state.rows
    # A longer step has few windows with tokens before it, and asks for all tokens at once.
    defines = kernel_defines(windows, early=store)
    kernel = Kernel("compressor/compressor", "compress", defines)
    shared_bytes = dict(defines)["SHARED_BYTES"]
    blocks, _ = split(weights, rows)
    recording.launch(
        by_tokens(_shape, kernel, blocks, shared_bytes, tokens_per_window),
        **ring_arguments(windows),
        norm=weights.norm,
        inv_freq=weights.inv_freq,
        data=rows.data,
        block_scale=rows.block_scale,
        row_slots=rows.slots,
        store=int(store),
        hadamard_keys=int(weights.rotate_keys),
        round=int(weights.compute_dtype == torch.bfloat16),
        eps=weights.norm_eps,
        normaliser=rows.width**-0.5,
    )


def ring_arguments(windows: Windows) -> dict[str, Tensor | int]:
    """The arguments of both kernels that concern the tokens and the ring."""
    ring = windows.state.ring
    return {
        "kv": windows.kv_TW,
        "score": windows.score_TW,
        "positions": windows.positions_T,
        "ape": windows.weights.ape,
        "ring_kv": ring.kv,
        "ring_score": ring.score,
        "kv_stride": windows.kv_TW.stride(0),
        "score_stride": windows.score_TW.stride(0),
        "slots": ring.kv.shape[0],
    }


def check_windows(windows: Windows) -> None:
    """Raises ``ValueError`` unless ``compress`` takes these; kv and score may be columns of wider
    tensors.
    """
    weights = windows.weights
    ring = windows.state.ring
    rows = windows.state.rows
    ratio = weights.ratio
    slots = ring.kv.shape[0]
    columns = rows.width * (2 if ratio == CSA_RATIO else 1)
    tokens = windows.kv_TW.shape[0]
    expect_rows("kv_TW", windows.kv_TW, torch.float32, (tokens, columns))
    expect_rows("score_TW", windows.score_TW, torch.float32, (tokens, columns))
    if rows.width > _WIDEST_ROW:
        raise ValueError(f"rows: found {rows.width} values, expected at most {_WIDEST_ROW}")
    if weights.compute_dtype not in (torch.bfloat16, torch.float32):
        expected = "torch.bfloat16 or torch.float32"
        raise ValueError(f"compute_dtype: found {weights.compute_dtype}, expected {expected}")
    least = history_tokens(ratio) + MAX_DECODE_TOKENS
    if slots < least:
        raise ValueError(f"ring: found {slots} slots, expected at least {least}")
    rotary = weights.inv_freq.shape[0]
    if 2 * rotary > rows.width:
        expected = f"at most {rows.width // 2}"
        raise ValueError(f"inv_freq: found {rotary} frequencies, expected {expected}")
    expect("positions_T", windows.positions_T, torch.int64, (tokens,))
    expect("ape", weights.ape, torch.float32, (ratio, columns))
    expect("norm", weights.norm, torch.float32, (rows.width,))
    expect("inv_freq", weights.inv_freq, torch.float32, (rotary,))
    expect("ring.kv", ring.kv, torch.float32, (slots, columns))
    expect("ring.score", ring.score, torch.float32, (slots, columns))
    check_rows("rows", rows)


def _shape(
    kernel: Kernel, blocks: int, shared_bytes: int, tokens_per_window: int, tokens: int
) -> Shape:
    grid = (blocks, ceil_div(tokens, tokens_per_window))
    return Shape(kernel, grid, THREADS, shared_bytes, blocks, {"count": tokens})
