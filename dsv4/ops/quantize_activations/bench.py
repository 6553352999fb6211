"""Quantisers of a prefill chunk: attention's input, the query's low rank with its norm, and rows
of the experts.
"""

from collections.abc import Callable, Iterator

import torch

from dsv4.launch.recording import Recording
from dsv4.ops.immediate import TimedOp
from dsv4.ops.moe.sorted_pairs import sort_by_expert
from dsv4.ops.op_case import OpCase
from dsv4.ops.quantize_activations import ActivationFormat
from dsv4.ops.quantize_activations.cuda import SwizzledRows, quantize_rows, quantize_sorted_rows

# E, the query's low rank, and the experts.
GEOMETRIES = {"Flash": (4096, 1024, 256), "Pro": (7168, 1536, 384)}
TOKENS = 4096
PER_TOKEN = 6
EPS = 1e-6


def cases() -> Iterator[OpCase]:
    """Chunks of 4,096 tokens in both formats."""
    for model, (width, low_rank, experts) in GEOMETRIES.items():
        for format in ActivationFormat:
            yield _rows(model, width, format, norm=False)
            yield _rows(model, low_rank, format, norm=True)
            yield _sorted(model, width, experts, format)


def _rows(model: str, width: int, format: ActivationFormat, norm: bool) -> OpCase:
    def make(index: int) -> Callable[[], object]:
        x = torch.randn(TOKENS, width, device="cuda").bfloat16()
        weight = torch.randn(width, device="cuda") if norm else None

        def op(recording: Recording, x: torch.Tensor) -> list[torch.Tensor]:
            return _parts(quantize_rows(recording, x, format, weight, EPS))

        return TimedOp(op, x).run

    nbytes = TOKENS * (2 * width + _row_bytes(width, format))
    name = f"{model} {width}{' normed' if norm else ''} {format.value} T={TOKENS}"
    return OpCase("quantize_rows", name, make, nbytes, 0, nbytes)


def _sorted(model: str, width: int, experts: int, format: ActivationFormat) -> OpCase:
    """The sort is part of the case."""

    def make(index: int) -> Callable[[], object]:
        x = torch.randn(TOKENS, width, device="cuda").bfloat16()
        ids = torch.rand(TOKENS, experts, device="cuda").topk(PER_TOKEN, dim=1).indices

        def op(recording: Recording, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
            pairs = sort_by_expert(recording, ids, experts)
            return _parts(quantize_sorted_rows(recording, x, pairs, format))

        return TimedOp(op, x, ids).run

    nbytes = TOKENS * (2 * width + PER_TOKEN * _row_bytes(width, format))
    name = f"{model} {width} sorted {format.value} T={TOKENS}"
    resident = nbytes + 128 * experts * _row_bytes(width, format)
    return OpCase("quantize_sorted_rows", name, make, nbytes, 0, resident)


def _parts(rows: SwizzledRows) -> list[torch.Tensor]:
    found = (rows.codes, rows.scales, rows.global_scale)
    return [part for part in found if part is not None]


def _row_bytes(width: int, format: ActivationFormat) -> int:
    """Codes and scales of a row."""
    return width // format.codes_per_byte + width // format.group_size
