"""How a step begins on a device: the positions of its tokens, and on the first their embedding.

Embedding: model.md#forward-pass. The device keeps the position of the next token (``position_1``).
A step may begin ``rejected_1`` tokens further back than the last one ended, because draft tokens
were rejected, and only the device knows how many. Every device has both for itself.
"""

import torch
from torch import Tensor


def embed(
    tokens_T: Tensor,
    position_1: Tensor,
    rejected_1: Tensor,
    table_VE: Tensor,
    streams: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``next_positions`` of the tokens, and their rows in M equal streams ``[T, M, E]``, unscaled.

    ``tokens_T`` int64, ids from 0 to V − 1; another id is an error of the caller, an ``IndexError``
    or a CUDA fault. The streams are of ``dtype``.
    """
    rows_TE = torch.nn.functional.embedding(tokens_T, table_VE).to(dtype)
    positions_T = next_positions(position_1, rejected_1, tokens_T.shape[0])
    return positions_T, rows_TE.unsqueeze(1).repeat(1, streams, 1)


def next_positions(position_1: Tensor, rejected_1: Tensor, tokens: int) -> Tensor:
    """f, f + 1, ..., f + T − 1 as int64 ``[T]``, where f = p − r.

    p is ``position_1`` and r ``rejected_1``. Both are int64 ``[1]`` and written: p becomes f + T,
    and r 0.
    """
    position_1.sub_(rejected_1)
    rejected_1.zero_()
    positions_T = position_1 + torch.arange(tokens, device=position_1.device)
    position_1.add_(tokens)
    return positions_T
