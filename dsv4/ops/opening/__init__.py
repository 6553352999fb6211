"""How a step begins on a device: the positions of its tokens, and on the first device their embedding (spec §2.1)."""

import torch
from torch import Tensor


def embed(
    tokens_T: Tensor, position_1: Tensor, table_VE: Tensor, streams: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``next_positions`` of the tokens, and their rows in M equal streams ``[T, M, E]`` of ``dtype``; no scaling.

    ``tokens_T`` int64, ids from 0 to V − 1; another id is an error of the caller, an ``IndexError`` or a CUDA fault.
    """
    rows_TE = torch.nn.functional.embedding(tokens_T, table_VE).to(dtype)
    return next_positions(position_1, tokens_T.shape[0]), rows_TE.unsqueeze(1).repeat(1, streams, 1)


def next_positions(position_1: Tensor, tokens: int) -> Tensor:
    """p, p + 1, ..., p + T − 1 as int64 ``[T]``; ``position_1``, int64 ``[1]``, moves on from p to p + T."""
    positions_T = position_1 + torch.arange(tokens, device=position_1.device)
    position_1.add_(tokens)
    return positions_T
