"""Products of published and unusual shapes, recorded on meta tensors."""

from typing import Any

import torch

from dsv4.launch.recording import Recording
from dsv4.ops.linear.row_list import PackedRows, pack_rows
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import (
    BF16,
    FP8,
    MXFP4,
    NVFP4,
    activations,
    empty,
    stored,
)

LISTS: dict[str, tuple[int, list[tuple[int, QuantFormat]]]] = {
    "Pro CSA input": (7168, [(1536, FP8), (512, FP8), *((n, BF16) for n in (1024, 1024, 256, 64))]),
    "Flash HCA input": (4096, [(1024, NVFP4), (512, NVFP4), (512, BF16), (512, BF16)]),
    "Pro query": (1536, [(65536, FP8), (8192, FP8)]),
    "Flash query": (1024, [(32768, NVFP4), (8192, NVFP4)]),
    "four formats": (128, [(64, MXFP4), (40, FP8), (24, BF16), (72, NVFP4), (8, FP8)]),
    "tiny": (64, [(7, BF16), (8, BF16)]),
}
# (format, N, K): o_b, w2 of a shared expert, heads, tiny and odd ones.
MATRICES = [
    (FP8, 7168, 16384),
    (NVFP4, 4096, 8192),
    (MXFP4, 7168, 3072),
    (BF16, 129280, 7168),
    (BF16, 65, 32),
    (NVFP4, 8, 32),
]
# (format, G, R, K): o_a, and groups whose rows are no tiles.
GROUPS = [(FP8, 16, 1024, 4096), (NVFP4, 8, 1024, 4096), (BF16, 4, 32, 128), (BF16, 2, 20, 96)]


def packed_list(matrices: list[tuple[int, QuantFormat]], columns: int) -> PackedRows:
    dtypes = [torch.float32 if format is BF16 else None for _, format in matrices]
    return pack_rows([stored(format, rows, columns) for rows, format in matrices], dtypes)


def record_everything(entry: Any, recording: Recording) -> None:
    """Every product of the tables above by the functions of ``entry``."""
    for columns, matrices in LISTS.values():
        rows = packed_list(matrices, columns)
        x = activations(recording, columns)
        entry.linear_rows(recording, x, rows)
        entry.linear_rows(recording, x, rows, empty(torch.float32, columns), 1e-6)
    for format, rows, columns in MATRICES:
        weight = pack_weight(stored(format, rows, columns))
        for dtype in (None, torch.float32):
            y = entry.linear(recording, activations(recording, columns), weight, dtype)
            assert y.shape == (recording.tokens, rows)
            assert y.dtype == (dtype or torch.bfloat16)
    for format, groups, rows, columns in GROUPS:
        weight = pack_weight(stored(format, groups * rows, columns))
        y = entry.grouped_linear(recording, activations(recording, groups, columns), weight)
        assert y.shape == (recording.tokens, groups, rows)
