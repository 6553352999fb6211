"""The products of a row list in steps of many tokens: one launch for all matrices of a format."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.launch.target import Target
from dsv4.ops.linear import RowList, prefill_long
from dsv4.ops.linear.decode_product import list_memory
from dsv4.ops.linear.prefill import (
    LARGE,
    MODE_LINEAR,
    NARROW,
    Results,
    Split,
    build_for,
    check_recorded,
    short_shape,
)
from dsv4.ops.linear.prefill_long import (
    Fastest,
    dense_form,
    long_shape,
    one_group,
    takes_boxes,
)
from dsv4.ops.linear.prefill_products import normalised
from dsv4.ops.linear.row_list import FormatRows, PackedRows, packed_rows
from dsv4.weights.packed import PADDING, TILE_ROWS


@dataclass(frozen=True)
class _Part:
    """The matrices of one format, and their entries in the ``table`` of their ``ListLaunch``, which
    counts tiles from ``first_tile`` on.
    """

    rows: FormatRows
    table: Tensor
    global_scale: Tensor
    first_tile: int

    @property
    def row_count(self) -> int:
        """Rows of all matrices together."""
        return self.rows.tiles * TILE_ROWS

    @property
    def arguments(self) -> dict[str, Tensor | int | None]:
        """What both kernels take."""
        return {
            "weight_block_scale": self.rows.block_scale,
            "weight_global_scale": self.global_scale,
            "table": self.table,
            "row_tiles": self.rows.tiles,
            "matrices": self.table.shape[0],
            "first_tile": self.first_tile,
        }


def linear_rows(
    recording: Recording,
    x: Tensor,
    rows: RowList,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """Products of one x ``[T, K]`` with every matrix: see ``dsv4.ops.linear.linear_rows``. T is the
    recording's number of tokens.

    The norm is a launch of its own. Lists of one matrix, those with padded rows, and those of more
    rows than multiprocessors multiply at once are recorded as ``dsv4.ops.linear.prefill_long``
    does.
    """
    packed = packed_rows(rows)
    if not _is_joined(packed, recording.target):
        return prefill_long.linear_rows(recording, x, rows, norm_weight, norm_eps)
    x_TK = normalised(recording, x, rows, norm_weight, norm_eps)
    tokens, columns = x_TK.shape
    check_recorded(recording, tokens)
    memory = list_memory(recording, packed, tokens)
    boxes = takes_boxes(recording, x_TK)
    for part in _parts(packed):
        split = Split.of(recording.target, MODE_LINEAR, part.row_count, columns)
        long_from = split.long_from if boxes and tokens >= split.long_from else None
        _record_short(recording, x_TK, part, memory, split, long_from)
        if long_from is not None:
            _record_long(recording, x_TK, part, memory, long_from)
    return packed.products(memory, tokens)


def _is_joined(rows: PackedRows, target: Target) -> bool:
    """Whether it has several matrices, of whole 64 rows each, so that those of a warpgroup are of
    one, and a short step no more row blocks than run at once: of two large products each shares K
    in its own way.
    """
    counts = [weight.shape[0] for weight in rows.weights]
    row_blocks = ceil_div(sum(counts), NARROW.rows(MODE_LINEAR))
    whole = all(count % PADDING == 0 for count in counts)
    return len(counts) > 1 and whole and row_blocks <= target.multiprocessors


def _parts(rows: PackedRows) -> Iterator[_Part]:
    for launch in rows.launches:
        first = 0
        first_tile = 0
        for part in launch.parts:
            end = first + sum(weight.format is part.format for weight in rows.weights)
            yield _Part(part, launch.table[first:end], launch.global_scale[first:end], first_tile)
            first = end
            first_tile += part.tiles


def _record_short(
    recording: Recording,
    x_TK: Tensor,
    part: _Part,
    y: Tensor,
    split: Split,
    fewer_than: int | None,
) -> None:
    architecture = recording.target.architecture
    variant = build_for(part.rows.format, MODE_LINEAR, architecture, Results.OF_A_LIST)
    recording.launch(
        by_tokens(short_shape, "prefill_rows", variant, split, fewer_than),
        x=x_TK,
        weight_data=part.rows.data,
        **part.arguments,
        y=y,
        **split.memory(recording),
        columns=x_TK.shape[1],
        capacity=recording.tokens,
        x_stride=x_TK.stride(0),
    )


def _record_long(
    recording: Recording, x_TK: Tensor, part: _Part, y: Tensor, long_from: int
) -> None:
    form = dense_form(part.rows.format, part.row_count, Results.OF_A_LIST)
    row_blocks = ceil_div(part.row_count, LARGE.rows(MODE_LINEAR))
    fastest = Fastest(part.rows.format, row_blocks, recording.target.multiprocessors)
    recording.launch(
        by_tokens(long_shape, "long_rows", form, fastest, long_from),
        x=form.token_boxes(one_group(x_TK)),
        **form.matrix_boxes(part.rows, "weight"),
        **part.arguments,
        y=y,
        columns=x_TK.shape[1],
        capacity=recording.tokens,
    )
