"""What the rows of a draft module are made of: their tokens and positions, and the main model's
streams of the positions before them (model.md#speculative-modules).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.linear import RowList, linear_rows

# The position of the next token, and how many of the last step's tokens do not count.
Place = tuple[Tensor, Tensor]


class Block(NamedTuple):
    """Tokens int64 ``[B]`` to be written: ``token_1``, and noise behind it."""

    tokens_B: Tensor
    token_1: Tensor
    noise: int


def begin_rows(place: Place, shift: int, rows_place: Place, block: Block | None = None) -> None:
    """The first position of a module's rows, p − r + shift, goes to the first tensor of
    ``rows_place`` and 0 to the second; p and r are those of ``place``. All are int64 ``[1]``.

    Writes the tokens of ``block``, where there is one.
    """
    position_1, rejected_1 = place
    rows_place[0].copy_(position_1 - rejected_1 + shift)
    rows_place[1].zero_()
    if block is not None:
        block.tokens_B.fill_(block.noise)
        block.tokens_B[:1].copy_(block.token_1)


def token_mixing(positions_T: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """The residual mix by which a token's part is added to every stream that stays what it is:
    post ``[T, M]``, 1, and 0 at position 0 or before; comb ``[T, M, M]``, the identity. Both are
    float32.
    """
    post_TM = (positions_T > 0).float()[:, None].repeat(1, streams)
    comb_MM = torch.eye(streams, dtype=torch.float32, device=positions_T.device)
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
