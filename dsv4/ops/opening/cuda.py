"""The opening of a step on the GPU: one launch per device."""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording

_SOURCE = "opening/opening"
# A thread copies 16 bytes; small blocks spread the row of a single token over multiprocessors.
_THREADS = 128
_PART_BYTES = 16


def embed(
    recording: Recording,
    tokens_T: Tensor,
    position_1: Tensor,
    rejected_1: Tensor,
    table_VE: Tensor,
    streams: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.opening.embed`` of a bfloat16 table to bfloat16; ``ValueError`` for others.

    An id outside the table ends as a CUDA fault.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"dtype: found {dtype}, expected torch.bfloat16")
    rows, width = table_VE.shape
    _check_positions(position_1, rejected_1)
    expect("tokens_T", tokens_T, torch.int64, (recording.tokens,))
    expect("table_VE", table_VE, dtype, (rows, width))
    nbytes = width * dtype.itemsize
    if nbytes % _PART_BYTES == 0 and is_aligned(table_VE, _PART_BYTES):
        kernel = Kernel(_SOURCE, "embed")
        parts = nbytes // _PART_BYTES
    else:
        kernel = Kernel(_SOURCE, "embed_any_geometry")
        parts = width
    positions_T = recording.empty((recording.tokens,), torch.int64)
    streams_TME = recording.empty((recording.tokens, streams, width), dtype)
    recording.launch(
        lambda tokens: Shape(kernel, (tokens, ceil_div(parts, _THREADS)), _THREADS, settles=True),
        tokens=tokens_T,
        position=position_1,
        rejected=rejected_1,
        step=recording.begin_step(),
        table=table_VE,
        positions=positions_T,
        streams=streams_TME,
        rows=rows,
        parts=parts,
        copies=streams,
    )
    return positions_T, streams_TME


def next_positions(
    recording: Recording, position_1: Tensor, rejected_1: Tensor, tokens: int
) -> Tensor:
    """``dsv4.ops.opening.next_positions`` of as many tokens as the recording is for."""
    if tokens != recording.tokens:
        raise ValueError(f"tokens: found {tokens}, expected {recording.tokens} of the recording")
    _check_positions(position_1, rejected_1)
    kernel = Kernel(_SOURCE, "next_positions")
    positions_T = recording.empty((tokens,), torch.int64)
    recording.launch(
        lambda count: Shape(kernel, 1, _THREADS, numbers={"tokens": count}, settles=True),
        position=position_1,
        rejected=rejected_1,
        positions=positions_T,
    )
    return positions_T


def _check_positions(position_1: Tensor, rejected_1: Tensor) -> None:
    expect("position_1", position_1, torch.int64, (1,))
    expect("rejected_1", rejected_1, torch.int64, (1,))
