"""What decode and prefill share of index selection: checks, and its two launches.

``index_scores`` writes the score of every entry that a token sees, as an integer that sorts like
it; ``top_k_tokens`` selects.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat
from dsv4.integers import round_up
from dsv4.launch.checks import expect, expect_rows
from dsv4.launch.constants import RowCode
from dsv4.launch.items import ShapeOf
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.ops.indexer.query import check_queries
from dsv4.ops.key_rows import check_rows, row_code

# Shared memory of a block on Hopper and Blackwell.
_MOST_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Selection:
    """The arguments of ``index_select``, checked. ``selected``: the width K of the result."""

    q_TID: Tensor
    weight_TI: Tensor
    score_scale: float
    keys: RowCache
    positions_T: Tensor
    selected: int

    @property
    def score_stride(self) -> int:
        """Scores from one token to the next: 16 bytes are read at once."""
        return round_up(self.keys.slots, 4)

    @property
    def key_code(self) -> RowCode:
        """How a key is stored."""
        return RowCode(row_code(self.keys))

    def behind(self, first: int) -> "Selection":
        """The same of the tokens from this one on."""
        return Selection(
            self.q_TID[first:],
            self.weight_TI[first:],
            self.score_scale,
            self.keys,
            self.positions_T[first:],
            self.selected,
        )


def checked_selection(
    q_TID: Tensor,
    weight_TI: Tensor,
    score_scale: float,
    keys: RowCache,
    positions_T: Tensor,
    index_topk: int,
) -> Selection:
    """Raises ``ValueError`` for a dtype, shape or layout that the kernels do not take."""
    check_queries(q_TID)
    tokens, heads, _ = q_TID.shape
    expect_rows("weight_TI", weight_TI, torch.float32, (tokens, heads))
    expect("positions_T", positions_T, torch.int64, (tokens,))
    _check_keys(keys, q_TID)
    if index_topk < 1:
        raise ValueError(f"index_topk: found {index_topk}, expected at least 1")
    selected = min(index_topk, keys.slots)
    return Selection(q_TID, weight_TI, score_scale, keys, positions_T, selected)


def record_selection(
    recording: Recording,
    selection: Selection,
    shapes: tuple[Shape | ShapeOf, Shape | ShapeOf],
    score_TS: Tensor,
    selected_TK: Tensor,
    peers: Tensor | None = None,
    first_token: int = 0,
) -> None:
    """Both launches, for the tokens of a step from number ``first_token`` on. ``shapes``: of
    index_scores and top_k; scores are int32 ``[T, stride]``. ``peers``: where the lists go too
    (``Peers.table_P``).
    """
    keys = selection.keys
    own = selection.behind(first_token)
    recording.launch(
        shapes[0],
        q=own.q_TID,
        weights=own.weight_TI,
        score_scale=float(selection.score_scale),
        data=keys.data,
        scales=keys.block_scale,
        positions=selection.positions_T,
        scores=score_TS,
        nan=recording.nan_1,
        slots=keys.slots,
        score_stride=selection.score_stride,
        weight_stride=selection.weight_TI.stride(0),
        first_token=first_token,
        selected=selection.selected,
    )
    recording.serve_choice(None)
    recording.launch(
        shapes[1],
        orders=score_TS,
        positions=own.positions_T,
        out=selected_TK,
        slots=keys.slots,
        stride=selection.score_stride,
        selected=selection.selected,
        peers=peers,
        first_token=first_token,
    )
    recording.serve_choice(None)


def _check_keys(keys: RowCache, q_TID: Tensor) -> None:
    heads, width = q_TID.shape[1:]
    if keys.format is RowFormat.KV_FP8 or keys.width != width:
        found = f"{keys.format.value} rows of {keys.width}"
        raise ValueError(f"keys: found {found}, expected index_fp8 or plain rows of {width}")
    if 4 * heads * (width + 1) > _MOST_SHARED_BYTES:
        expected = f"at most {_MOST_SHARED_BYTES // 4} values"
        raise ValueError(f"q_TID: found {heads} heads of {width}, expected {expected}")
    check_rows("keys", keys)
