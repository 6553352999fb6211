"""The opening of a step on the GPU: one launch per device."""

import torch
from torch import Tensor

from dsv4.launch.loader import launch
from dsv4.ops.attention.decode import expect

_THREADS, _PART_BYTES = 128, 16


def embed(
    tokens_T: Tensor, position_1: Tensor, table_VE: Tensor, streams: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.opening.embed`` of a bfloat16 table to bfloat16; ``ValueError`` for others. An id outside the table
    ends as a CUDA fault.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"dtype: found {dtype}, expected torch.bfloat16")
    (tokens,), (rows, width), device = tokens_T.shape, table_VE.shape, position_1.device
    expect("position_1", position_1, torch.int64, (1,), device)
    expect("tokens_T", tokens_T, torch.int64, (tokens,), device)
    expect("table_VE", table_VE, dtype, (rows, width), device)
    positions_T = torch.empty_like(tokens_T)
    streams_TME = torch.empty(tokens, streams, width, dtype=dtype, device=device)
    if tokens:
        wide = width * dtype.itemsize % _PART_BYTES == 0 and table_VE.data_ptr() % _PART_BYTES == 0
        parts = width * dtype.itemsize // _PART_BYTES if wide else width
        launch(
            "opening",
            "embed" if wide else "embed_any_width",
            (tokens, -(-parts // _THREADS)),
            _THREADS,
            tokens_T,
            position_1,
            table_VE,
            positions_T,
            streams_TME,
            rows,
            parts,
            streams,
            device=device,
        )
    return positions_T, streams_TME


def next_positions(position_1: Tensor, tokens: int) -> Tensor:
    """``dsv4.ops.opening.next_positions``."""
    expect("position_1", position_1, torch.int64, (1,), position_1.device)
    positions_T = torch.empty(tokens, dtype=torch.int64, device=position_1.device)
    launch("opening", "next_positions", 1, _THREADS, position_1, positions_T, tokens, device=position_1.device)
    return positions_T
