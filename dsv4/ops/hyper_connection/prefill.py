"""Hyper-connections of a long step: mixes on the tensor cores, a block for each token's rest."""

from dsv4.integers import ceil_div
from dsv4.launch.constants import TOKEN_TILE
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.exchange.token_share import WHOLE, TokenShare, share_of
from dsv4.ops.hyper_connection.recorded_ops import RecordedOps
from dsv4.ops.hyper_connection.seam import (
    Seam,
    SeamForm,
    SeamShapes,
    finish_shape,
    mix_shape,
    mix_splits,
)

# hyper_connection_prefill.cu: warps of a block, which has a tile of tokens, columns of a warp's
# step, and the most streams that it takes.
_WARPS = 8
_CHUNK = 32
_MOST_STREAMS = 4
# 480 workers and the warp of post and comb are 512 threads: two blocks of 64 registers a thread
# fill a multiprocessor, and the second one hides the latencies. Pro has two accesses a thread.
_MOST_WORKERS = 480


def _share(recording: Recording, streams: int, width: int) -> TokenShare:
    """What the rank has of the tokens: all of them in streams that the tiles' kernel does not
    take.
    """
    usual = streams <= _MOST_STREAMS and width % 8 == 0
    return share_of(recording) if usual else WHOLE


def _shapes(recording: Recording, seam: Seam, share: TokenShare) -> SeamShapes:
    multiprocessors = recording.target.multiprocessors
    if seam.streams > _MOST_STREAMS or seam.mix_columns(8) != 8:
        if share.owners > 1:
            raise ValueError("fn: found an address that is no multiple of 16, expected one")
        return _unusual_shapes(recording, seam)

    tiles = range(TOKEN_TILE, recording.tokens + TOKEN_TILE, TOKEN_TILE)
    return SeamShapes(
        by_tokens(_tile_shape, seam.form, multiprocessors, share),
        by_tokens(_finish_shape, seam.form, multiprocessors, share),
        max(
            min(tokens, recording.tokens) * _splits(tokens, seam.width, multiprocessors)
            for tokens in tiles
        ),
        mix_takes="owner",
    )


def _unusual_shapes(recording: Recording, seam: Seam) -> SeamShapes:
    """The decode step's kernel: for more streams, and for rows that cannot be read in vectors."""
    multiprocessors = recording.target.multiprocessors
    splits = mix_splits(seam, multiprocessors)
    return SeamShapes(
        lambda tokens: mix_shape(seam, multiprocessors, tokens),
        lambda tokens: finish_shape(seam.form, tokens, splits, 1, _MOST_WORKERS),
        recording.tokens * splits,
    )


def _tile_shape(form: SeamForm, multiprocessors: int, share: TokenShare, tokens: int) -> Shape:
    """``hc_mix_many``: a block for every tile of a share of the tokens and split of the columns.

    Shares change no sum: the splits are those of all tokens.
    """
    splits = _splits(tokens, form.width, multiprocessors)
    # Two stages of a chunk of every row that the warps read: the streams, and y.
    rows = TOKEN_TILE * (form.streams + form.post)
    shared_bytes = 2 * _WARPS * rows * 2 * _CHUNK
    defines = (
        *form.defines,
        ("POST", int(form.post)),
        ("SPLITS", splits),
        ("SHARED_BYTES", shared_bytes),
        *share.defines,
    )
    kernel = Kernel("hyper_connection/hyper_connection_prefill", "hc_mix_many", defines)
    grid = share.tiles(tokens), splits
    numbers = {"tokens": tokens}
    settles = not form.post
    return Shape(kernel, grid, 32 * _WARPS, shared_bytes, numbers=numbers, settles=settles)


def _finish_shape(form: SeamForm, multiprocessors: int, share: TokenShare, tokens: int) -> Shape:
    splits = _splits(tokens, form.width, multiprocessors)
    return finish_shape(form, tokens, splits, 1, _MOST_WORKERS, share)


def _splits(tokens: int, width: int, multiprocessors: int) -> int:
    """Splits of the columns: a power of two that gives at most two blocks per multiprocessor.

    Every split has a chunk of columns for each warp.
    """
    blocks = ceil_div(tokens, TOKEN_TILE)
    splits = 1
    while blocks * splits <= multiprocessors and _WARPS * _CHUNK * splits < width:
        splits *= 2
    return splits


_OPS = RecordedOps(_shapes, 128, _share)
hc_pre = _OPS.hc_pre
hc_seam = _OPS.hc_seam
hc_post = _OPS.hc_post
hc_head = _OPS.hc_head
