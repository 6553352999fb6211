"""What the rows of a draft module are made of: their tokens and positions, and the main model's
streams of the positions before them (model.md#speculative-modules).
"""

import torch
from torch import Tensor

from dsv4.ops.linear import RowList, linear_rows


def begin_rows(
    position_1: Tensor,
    rejected_1: Tensor,
    shift: int,
    rows_position_1: Tensor,
    rows_rejected_1: Tensor,
    token_1: Tensor | None = None,
    tokens_B: Tensor | None = None,
    noise: int = 0,
) -> None:
    """The first position of a module's rows, p − r + shift, goes to ``rows_position_1``, and 0 to
    ``rows_rejected_1``; p and r, ``position_1`` and ``rejected_1``, are the main model's.

    With ``token_1``, tokens = token, noise, noise, ... All are int64.
    """
    rows_position_1.copy_(position_1 - rejected_1 + shift)
    rows_rejected_1.zero_()
    if token_1 is not None and tokens_B is not None:
        tokens_B.fill_(noise)
        tokens_B[:1].copy_(token_1)


def token_mixing(
    positions_T: Tensor, streams: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The residual mix by which a token's part is added to every stream that stays what it is:
    post ``[T, M]``, 1, and 0 at position 0 or before; comb ``[T, M, M]``, the identity.
    """
    post_TM = (positions_T > 0).to(dtype)[:, None].repeat(1, streams)
    comb_MM = torch.eye(streams, dtype=dtype, device=positions_T.device)
    return post_TM, comb_MM.repeat(positions_T.shape[0], 1, 1)


def stream_linear(
    streams_TME: Tensor, rows: RowList, norm_weight: Tensor, norm_eps: float
) -> Tensor:
    """``linear_rows`` of every stream with the only matrix of ``rows``: ``[T, M, N]``."""
    tokens, streams, width = streams_TME.shape
    flat = streams_TME.reshape(tokens * streams, width)
    (product,) = linear_rows(flat, rows, norm_weight, norm_eps)
    return product.view(tokens, streams, -1)


def shift_streams(streams_TME: Tensor, ring_SME: Tensor, first_1: Tensor) -> Tensor:
    """The streams of the positions f, f + 1, ... ``[T, M, E]``: the first from slot f mod S of the
    ring, the others from ``streams_TME``, which are those of f + 1, ... and all go to the ring.

    f is the int64 ``first_1``, −1 for the first position of a sequence. T is below S.
    """
    slots = ring_SME.shape[0]
    rows_TME = torch.cat((ring_SME[first_1 % slots], streams_TME[:-1]))
    steps = torch.arange(1, streams_TME.shape[0] + 1, device=first_1.device)
    ring_SME[(first_1 + steps) % slots] = streams_TME
    return rows_TME


def recall_streams(ring_SME: Tensor, position_1: Tensor) -> Tensor:
    """The streams of a position ``[1, M, E]`` from its slot of the ring."""
    return ring_SME[position_1 % ring_SME.shape[0]]
