"""Hyper-connections of a decode step: blocks share the columns of every token."""

from dsv4.integers import ceil_div
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.token_share import WHOLE, TokenShare
from dsv4.ops.hyper_connection import HcWeights
from dsv4.ops.hyper_connection.recorded_ops import RecordedOps
from dsv4.ops.hyper_connection.seam import (
    Seam,
    SeamShapes,
    finish_shape,
    mix_shape,
    mix_splits,
    words_of,
)

# Four blocks share a token in hc_finish, which shortens their loads: 3.07 to 2.35 µs for Pro, and
# eight are no better. Narrow streams of fewer than 256 accesses have nothing to share.
_FINISH_BLOCKS = 4
_SHARED_ACCESSES = 256
# Whole warps that, with those of post and comb, stay below the 1,024 threads of a block: wider
# streams take several accesses a thread.
_MOST_WORKERS = 864


def _shapes(recording: Recording, seam: Seam, share: TokenShare) -> SeamShapes:
    tokens = recording.tokens
    multiprocessors = recording.target.multiprocessors
    splits = mix_splits(seam, multiprocessors)
    words = words_of(recording, seam.incoming and seam.incoming.y).defines
    peers = recording.peers
    counter = () if peers is None else (peers.step_4,)
    settled = seam.incoming is not None and recording.is_settled(*seam.older, *counter)
    mix = mix_shape(seam, multiprocessors, tokens, words, settled)
    accesses = ceil_div(seam.width, seam.form.finish_columns)
    blocks = _FINISH_BLOCKS if accesses >= _SHARED_ACCESSES else 1
    # Traced values are shown at once.
    leaves = isinstance(seam.weights, HcWeights) and not recording.traced
    finish = finish_shape(seam.form, tokens, splits, blocks, _MOST_WORKERS, leaves=leaves)
    return SeamShapes(mix, finish, tokens * splits, leaves=leaves)


# More, smaller blocks than in a long step: one token's columns spread over more multiprocessors.
_OPS = RecordedOps(_shapes, 64, lambda *_: WHOLE)
hc_pre = _OPS.hc_pre
hc_seam = _OPS.hc_seam
hc_post = _OPS.hc_post
hc_head = _OPS.hc_head
