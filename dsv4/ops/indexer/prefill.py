"""Index selection of a long step, in tiles of tokens whose scores fit one piece of memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.launch.constants import TOKEN_TILE
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.exchange.token_share import WHOLE, TokenShare, send_rows, share_of
from dsv4.ops.exchange.words import peers_of
from dsv4.ops.indexer.selection import checked_selection, record_selection
from dsv4.ops.indexer.selection_shapes import SelectionShapes

# Scores of one tile: 2,047 tokens at a context of 128k, 255 at one of 1M; so many, and parts of
# their entries, give all multiprocessors work.
_SCORE_BYTES = 256 << 20


def index_select(
    recording: Recording,
    q_TID: Tensor,
    weight_TI: Tensor,
    score_scale: float,
    keys: RowCache,
    positions_T: Tensor,
    index_topk: int,
) -> Tensor:
    """``dsv4.ops.indexer.index_select`` of 9 tokens and more, with the results of ``decode``.

    The scores take at most 256 MiB: longer steps are cut into tiles of tokens, one after the other.
    Ranks share the tokens and send each other their lists.
    """
    selection = checked_selection(q_TID, weight_TI, score_scale, keys, positions_T, index_topk)
    tokens = q_TID.shape[0]
    share = share_of(recording)
    if share.owners * TOKEN_TILE > tokens:
        share = WHOLE  # some ranks would have no token
    shapes = SelectionShapes.of(recording, selection, share)
    peers = None if share is WHOLE else peers_of(recording)
    table_P = None if peers is None else peers.table_P
    stride = selection.score_stride
    own = share.tokens(tokens)
    tile = max(1, _SCORE_BYTES // (torch.int32.itemsize * stride))
    if share is not WHOLE:
        tile = max(TOKEN_TILE, tile // TOKEN_TILE * TOKEN_TILE)
    score_TS = recording.empty((min(tile, own), stride), torch.int32)
    selected_TK = recording.empty((tokens, selection.selected), torch.int64)
    for start in range(0, own, tile):
        first = share.token(start)
        part = _Tile(start, min(tile, own - start))
        launched = (
            by_tokens(_scores_shape, shapes, part),
            by_tokens(_top_k_shape, shapes, part),
        )
        part_TK = selected_TK[first:]
        record_selection(recording, selection, launched, score_TS, part_TK, table_P, first)
    if peers is not None:
        send_rows(recording, selected_TK, peers.chosen_TK)
    return selected_TK


class _Tile(NamedTuple):
    """``count`` tokens of those that are the share's, from number ``start`` on."""

    start: int
    count: int

    def here(self, share: TokenShare, tokens: int) -> int:
        """How many of a step's tokens are in this tile; none where it is less than 1."""
        return min(share.tokens(tokens) - self.start, self.count)


def _scores_shape(shapes: SelectionShapes, tile: _Tile, tokens: int) -> Shape | None:
    here = tile.here(shapes.share, tokens)
    if here <= 0:
        return None
    return shapes.decode_scores(here) if _is_few(shapes, here) else shapes.prefill_scores(here)


def _top_k_shape(shapes: SelectionShapes, tile: _Tile, tokens: int) -> Shape | None:
    here = tile.here(shapes.share, tokens)
    if here <= 0:
        return None
    return shapes.decode_top_k(here) if _is_few(shapes, here) else shapes.prefill_top_k(here)


def _is_few(shapes: SelectionShapes, tokens: int) -> bool:
    """Whether a lone rank's tokens are launched as in a decode step."""
    return shapes.share.owners == 1 and tokens <= MAX_DECODE_TOKENS
