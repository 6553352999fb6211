"""Weight-only linear layers of up to 8 tokens on packed weights: one launch for all matrices of one
or two formats.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.buffers import is_aligned
from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.kernel import Kernel, Shape, ceil_div
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.exchange.words import NOT_SENT, Words
from dsv4.ops.linear import RowList
from dsv4.ops.linear.checks import check_grouped, check_linear, check_norm
from dsv4.ops.linear.decode_pair import join_products
from dsv4.ops.linear.decode_plan import (
    WARPS,
    LinearPlan,
    ProductShape,
    has_room_for_columns,
    plan_linear,
)
from dsv4.ops.linear.row_list import FormatRows, ListLaunch, PackedRows, packed_rows
from dsv4.ops.norm.cuda import rms_norm
from dsv4.weights.packed import TILE_ROWS, PackedWeight
from dsv4.weights.quant import Weight

# log2 of the row tiles per row of FP8 block scales: as stored (128 rows), and in a row list (64
# rows).
_STORED_SCALE_SHIFT = 3
_LIST_SCALE_SHIFT = 2


class _Norm(NamedTuple):
    """The RMS norm of x before a product; none without a weight."""

    weight: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class _Product:
    """What one launch multiplies x with: row tiles of at most two formats, of a list or of the
    groups of one matrix.

    ``table``: of a list (``ListLaunch``). None: one matrix with ``rows`` rows per group.
    ``global_scale`` float32 per matrix.
    """

    parts: tuple[FormatRows, ...]
    shape: ProductShape
    scale_shift: int
    global_scale: Tensor | None
    table: Tensor | None = None
    rows: int = 0
    float32_out: bool = False

    def arguments(self, plan: LinearPlan) -> dict[str, Tensor | int | None]:
        """Those of ``decode_linear`` that describe the product."""
        first = self.parts[0]
        second = self.parts[1] if len(self.parts) > 1 else None
        return {
            "columns": self.shape.columns,
            "slice_columns": plan.slice_columns,
            "data0": first.data,
            "scale0": first.block_scale,
            "tiles0": self.shape.tiles[0],
            "clusters0": plan.clusters[0],
            "groups": self.shape.groups,
            "data1": second.data if second else None,
            "scale1": second.block_scale if second else None,
            "tiles1": self.shape.tiles[1] if second else 0,
            "clusters1": plan.clusters[1] if second else 0,
            "scale_shift": self.scale_shift,
            "global_scale": self.global_scale,
            "table": self.table,
            "matrices": 1 if self.table is None else self.table.shape[0],
            "rows": self.rows,
            "float32_out": int(self.float32_out),
        }


def linear(
    recording: Recording, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x · Wᵀ, float32 accumulation, one rounding: see ``dsv4.ops.linear.linear``.

    x bfloat16 ``[T, K]``, T from 1 to 8, y ``[T, N]`` bfloat16 or float32. Products of 4-bit and
    FP8 weights with x are exact in the tensor core, but for values of x below 2^-29 of their
    token's largest. Raises ``ValueError`` naming the argument for anything else.
    """
    dtype = out_dtype or torch.bfloat16
    packed = check_linear(x, weight, dtype)
    y = recording.empty((x.shape[0], packed.shape[0]), dtype)
    _record(recording, _matrix_product(packed, 1, dtype), x.unsqueeze(1), _Norm(), y)
    return y


def linear_words(recording: Recording, x: Tensor, weight: Weight, words: Words) -> None:
    """``linear`` whose float32 sums are pushed to the ranks as ``words`` instead of rounded."""
    packed = check_linear(x, weight, torch.float32)
    product = _matrix_product(packed, 1, torch.float32)
    _record(recording, product, x.unsqueeze(1), _Norm(), None, words)


def linear_columns(
    recording: Recording, x: Tensor, weight: Weight, y_TN: Tensor, first: int
) -> None:
    """``linear`` into columns ``first`` and following of float32 ``y_TN``, whose width and
    ``first`` are multiples of 16.
    """
    packed = check_linear(x, weight, torch.float32)
    width = y_TN.shape[1]
    stop = first + packed.shape[0]
    if width % TILE_ROWS or first % TILE_ROWS or stop > width:
        raise ValueError(
            f"y_TN: found columns {first} to {stop} of {width}, expected some of them, and "
            f"multiples of {TILE_ROWS}"
        )
    product = replace(_matrix_product(packed, 1, torch.float32), rows=width)
    _record(recording, product, x.unsqueeze(1), _Norm(), y_TN[:, first:])


def grouped_linear(recording: Recording, x_TGK: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal linear of 1 to 8 tokens: see ``dsv4.ops.linear.grouped_linear``. x bfloat16
    ``[T, G, K]`` → ``[T, G, R]``.
    """
    packed = check_grouped(x_TGK, weight)
    tokens, groups, _ = x_TGK.shape
    y_TGR = recording.empty((tokens, groups, packed.shape[0] // groups), torch.bfloat16)
    product = _matrix_product(packed, groups, torch.bfloat16)
    _record(recording, product, x_TGK, _Norm(), y_TGR)
    return y_TGR


def linear_rows(
    recording: Recording,
    x: Tensor,
    rows: RowList,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """``linear`` of one x ``[T, K]`` with every matrix of the list: see
    ``dsv4.ops.linear.linear_rows``.

    One launch for at most two formats, norm included, and the products are views of one buffer.
    """
    packed = packed_rows(rows)
    packed.check(x)
    check_norm(norm_weight, packed.width)
    tokens = x.shape[0]
    _check_tokens(tokens)
    norm = _Norm(norm_weight, norm_eps)
    # A block that sees K in slices has no row to normalise.
    products = [_list_product(packed, launch, recording) for launch in packed.launches]
    plans = [plan_linear(product.shape, tokens, recording.target) for product in products]
    if norm_weight is not None and any(plan.slice_columns < packed.width for plan in plans):
        x = rms_norm(recording, x, norm_weight, norm_eps)
        norm = _Norm()
    # In words, because a view as float32 needs whole ones.
    memory = recording.empty((ceil_div(tokens * packed.bytes_per_token, 4),), torch.float32)
    for product in products:
        _record(recording, product, x.unsqueeze(1), norm, memory)
    return packed.products(memory, tokens)


def _matrix_product(weight: PackedWeight, groups: int, dtype: torch.dtype) -> _Product:
    """The product with one matrix, or with each of its ``groups`` groups of rows."""
    rows = weight.shape[0] // groups
    # Groups that do not begin on a tile boundary compute the tiles they share with a neighbour, and
    # write their rows.
    tiles = ceil_div(rows, TILE_ROWS) + (1 if groups > 1 and rows % TILE_ROWS else 0)
    part = FormatRows(weight.format, weight.data, weight.block_scale)
    shape = ProductShape((weight.format,), (tiles,), weight.shape[1], groups)
    float32_out = dtype == torch.float32
    return _Product(
        (part,),
        shape,
        _STORED_SCALE_SHIFT,
        weight.global_scale,
        rows=rows,
        float32_out=float32_out,
    )


def _list_product(rows: PackedRows, launch: ListLaunch, recording: Recording) -> _Product:
    """Where blocks have all of K, they multiply what serves the indexer's choice behind the rest,
    so that dense steps leave it out.
    """
    shape = rows.shape_of(launch)
    if not has_room_for_columns(shape, recording.tokens, recording.target):
        shape = launch.shape
    return _Product(launch.parts, shape, _LIST_SCALE_SHIFT, launch.global_scale, launch.table)


def _record(
    recording: Recording,
    product: _Product,
    x_TGK: Tensor,
    norm: _Norm,
    y: Tensor | None,
    words: Words = NOT_SENT,
) -> None:
    """The launch of a product, whose result goes to ``y`` or out as ``words``; with the one before
    it where both can be one.
    """
    tokens, groups, _ = x_TGK.shape
    _check_tokens(tokens)
    plan = plan_linear(product.shape, tokens, recording.target)
    formats = [FORMAT_CODE[part.format] for part in product.parts]
    defines = (
        ("FORMAT0", formats[0]),
        ("FORMAT1", formats[1] if len(formats) > 1 else -1),
        ("FUSED_NORM", int(norm.weight is not None)),
        ("ALIGNED_X", int(_is_aligned(x_TGK, norm))),
        *plan.defines,
        *words.defines,
    )
    shape = Shape(
        Kernel("linear/decode_linear", "decode_linear", defines),
        plan.blocks(groups),
        32 * WARPS,
        plan.shared_bytes,
        plan.cluster,
        {"later_tiles": product.shape.later},
    )
    recording.launch(
        shape,
        x=x_TGK,
        row_stride=x_TGK.stride(0),
        group_stride=x_TGK.stride(1) if groups > 1 else 0,
        tokens=tokens,
        norm_weight=norm.weight,
        eps=norm.eps,
        y=y,
        **product.arguments(plan),
        x_bytes=plan.activation_bytes,
        partial_bytes=plan.partial_bytes,
        **words.arguments,
    )
    if plan.has_later:
        recording.serve_choice(replace(shape, numbers={"later_tiles": 0}))
    join_products(recording)


def _is_aligned(x_TGK: Tensor, norm: _Norm) -> bool:
    """Whether 8 columns of x, and of the norm's weight, are always 16 or 32 aligned bytes."""
    starts = (x_TGK,) if norm.weight is None else (x_TGK, norm.weight)
    steps = (*x_TGK.stride()[:2], x_TGK.shape[2])
    return all(map(is_aligned, starts)) and all(step % 8 == 0 for step in steps)


def _check_tokens(tokens: int) -> None:
    if not 1 <= tokens <= MAX_DECODE_TOKENS:
        raise ValueError(f"x: found {tokens} tokens, expected 1 to {MAX_DECODE_TOKENS}")
