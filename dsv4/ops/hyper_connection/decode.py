"""Hyper-connections of a decode step: blocks share the columns of every token."""

from torch import Tensor

from dsv4.launch.kernel import ceil_div
from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights
from dsv4.ops.hyper_connection.seam import (
    Incoming,
    Seam,
    SeamShapes,
    checked_seam,
    finish_shape,
    mix_shape,
    mix_splits,
    record_head,
    record_post,
    record_pre,
    record_seam,
)

# Four blocks share a token in hc_finish, which shortens their loads: 3.07 to 2.35 µs for Pro, and
# eight are no better. Narrow streams of fewer than 256 accesses have nothing to share.
_FINISH_BLOCKS = 4
_SHARED_ACCESSES = 256
# Whole warps that, with the warp of post and comb, stay below the 1,024 threads of a block: wider
# streams take several accesses a thread.
_MOST_WORKERS = 960
# More, smaller blocks than in a long step: one token's columns spread over more multiprocessors.
_POST_THREADS = 64


def hc_pre(
    recording: Recording, streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``dsv4.ops.hyper_connection.hc_pre`` of 1 to 8 tokens for 1 to 8 bfloat16 streams.

    Raises ``ValueError`` for others.
    """
    seam = checked_seam(streams_TME, None, weights, norm_weight)
    return record_pre(recording, seam, _shapes(recording, seam))


def hc_seam(
    recording: Recording,
    y_TE: Tensor,
    streams_TME: Tensor,
    post_TM: Tensor,
    comb_TMM: Tensor,
    weights: HcWeights,
    norm_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dsv4.ops.hyper_connection.hc_seam``; the streams are written to new memory."""
    incoming = Incoming(y_TE, post_TM, comb_TMM)
    seam = checked_seam(streams_TME, incoming, weights, norm_weight)
    return record_seam(recording, seam, _shapes(recording, seam))


def hc_head(
    recording: Recording, streams_TME: Tensor, weights: HcHeadWeights, norm_weight: Tensor
) -> Tensor:
    """``dsv4.ops.hyper_connection.hc_head`` for bfloat16 streams."""
    seam = checked_seam(streams_TME, None, weights, norm_weight)
    return record_head(recording, seam, _shapes(recording, seam))


def hc_post(
    recording: Recording, y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor
) -> Tensor:
    """``dsv4.ops.hyper_connection.hc_post`` for bfloat16 y and streams."""
    incoming = Incoming(y_TE, post_TM, comb_TMM)
    return record_post(recording, incoming, streams_TME, _POST_THREADS)


def _shapes(recording: Recording, seam: Seam) -> SeamShapes:
    tokens = recording.tokens
    multiprocessors = recording.target.multiprocessors
    splits = mix_splits(seam, multiprocessors)
    # From 3 tokens on blocks have two tokens each, which share the weights of fn in registers.
    mix = mix_shape(seam, multiprocessors, tokens, block_tokens=1 if tokens <= 2 else 2)
    accesses = ceil_div(seam.width, seam.finish_columns())
    blocks = _FINISH_BLOCKS if accesses >= _SHARED_ACCESSES else 1
    finish = finish_shape(seam, tokens, splits, blocks, _MOST_WORKERS)
    return SeamShapes(mix, finish, tokens * splits)
