"""Weight-only linear layers on packed weights: one launch per call for up to 8 tokens, GEMMs for more."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.loader import Launch, multiprocessors, prepare
from dsv4.ops.linear import RowList
from dsv4.ops.linear.decode_plan import (
    FORMAT_CODES,
    MAX_MATRICES,
    MAX_TOKENS,
    LinearPlan,
    ProductShape,
    plan_linear,
)
from dsv4.ops.linear.prefill import prefill_grouped_linear, prefill_linear
from dsv4.ops.norm.cuda import rms_norm
from dsv4.ops.remembered import layouts, remembered
from dsv4.quant import QuantFormat, QuantTensor
from dsv4.weights.packed import TILE_ROWS, PackedWeight, pack_weight

# log2 of the row tiles per row of FP8 block scales: as stored (128 rows), and in a row list (64 rows).
_STORED_SCALE_SHIFT, _LIST_SCALE_SHIFT = 3, 2


@dataclass(frozen=True)
class FormatRows:
    """The matrices of one format of a launch, row tiles one after the other: ``data`` ``[tiles, …]``."""

    format: QuantFormat
    data: Tensor
    block_scale: Tensor | None

    @property
    def tiles(self) -> int:
        return self.data.shape[0]


class Norm(NamedTuple):
    """The RMS norm of x before a product; none without a weight."""

    weight: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Product:
    """What one launch multiplies x with: row tiles of at most two formats, of a list or of the groups of one matrix.

    ``table`` int32 ``[matrices, 4]`` of a list: first tile, rows, offset of the product in bytes per token, whether it
    is float32. None: one matrix with ``rows`` rows per group. ``global_scale`` float32 ``[matrices]``.
    """

    parts: tuple[FormatRows, ...]
    shape: ProductShape
    scale_shift: int
    global_scale: Tensor | None
    table: Tensor | None = None
    rows: int = 0
    float32_out: bool = False

    @property
    def formats(self) -> tuple[int, int]:
        """Codes of the kernels, −1 for none."""
        codes = [FORMAT_CODES[part.format] for part in self.parts]
        return codes[0], codes[1] if len(codes) > 1 else -1

    def arguments(self, plan: LinearPlan) -> tuple[Tensor | int | None, ...]:
        """Those that describe the product, in the order of ``Product`` in ``decode_linear.cu``."""
        rows = [
            (part.data, part.block_scale, tiles, clusters)
            for part, tiles, clusters in zip(self.parts, self.shape.tiles, plan.clusters, strict=True)
        ]
        second = rows[1] if len(rows) > 1 else (None, None, 0, 0)
        matrices = 1 if self.table is None else self.table.shape[0]
        return (
            *(self.shape.columns, plan.slice_columns, *rows[0], self.shape.groups, *second),
            *(self.scale_shift, self.global_scale, self.table, matrices, self.rows, int(self.float32_out)),
        )


class _View(NamedTuple):
    """Arguments of ``as_strided`` for memory that is seen as ``dtype``."""

    dtype: torch.dtype
    size: tuple[int, int]
    strides: tuple[int, int]
    offset: int


@dataclass(frozen=True)
class PackedRows(RowList):
    """A row list whose matrices share memory by format. ``offsets[i]``: bytes per token before product i."""

    weights: tuple[PackedWeight, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    launches: tuple[Product, ...]
    offsets: tuple[int, ...]
    bytes_per_token: int

    @property
    def width(self) -> int:
        """K."""
        return self.weights[0].shape[1]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of the products."""
        return [dtype or torch.bfloat16 for dtype in self.out_dtypes]

    def views(self, tokens: int) -> list[_View]:
        """The products ``[T, N_i]`` in the memory that they share."""
        return [
            _View(dtype, (tokens, weight.shape[0]), (weight.shape[0], 1), tokens * offset // dtype.itemsize)
            for weight, dtype, offset in zip(self.weights, self.dtypes, self.offsets, strict=True)
        ]


def pack_rows(
    weights: Sequence[QuantTensor], out_dtypes: Sequence[torch.dtype | None], cutedsl: bool = False
) -> PackedRows:
    """Packs up to 8 matrices of one K for ``linear_rows``; see ``pack_weight``.

    Raises ``ValueError`` when the widths differ or a dtype is neither None, bfloat16 nor float32.
    """
    packed = [pack_weight(weight, cutedsl) for weight in weights]
    if not 1 <= len(packed) <= MAX_MATRICES or len({weight.shape[1] for weight in packed}) != 1:
        shapes = [weight.shape for weight in packed]
        raise ValueError(f"weights: found shapes {shapes}, expected 1 to {MAX_MATRICES} matrices of one K")
    dtypes = [torch.bfloat16 if dtype is None else dtype for dtype in out_dtypes]
    if len(dtypes) != len(packed) or not set(dtypes) <= {torch.bfloat16, torch.float32}:
        raise ValueError(f"out_dtypes: found {out_dtypes}, expected {len(packed)} of None, bfloat16, float32")
    # float32 products first, so that each starts on a multiple of its element size for every number of tokens.
    offsets, total = [0] * len(packed), 0
    for index in sorted(range(len(packed)), key=lambda index: -dtypes[index].itemsize):
        offsets[index], total = total, total + packed[index].shape[0] * dtypes[index].itemsize
    formats = sorted({weight.format for weight in packed}, key=FORMAT_CODES.__getitem__)
    launches = []
    for pair in (formats[:2], formats[2:]):
        parts, table, scales = [], [], []
        for format in pair:
            members = [index for index, weight in enumerate(packed) if weight.format is format]
            first = sum(part.tiles for part in parts)
            part = _join([packed[index] for index in members])
            for index in members:
                weight = packed[index]
                tiles = weight.data.shape[0]
                start = first - sum(part.tiles for part in parts)
                packed[index] = replace(weight, data=part.data[start : start + tiles])
                table.append([first, weight.shape[0], offsets[index], int(dtypes[index] == torch.float32)])
                scales.append(torch.ones(()) if weight.global_scale is None else weight.global_scale.cpu())
                first += tiles
            parts.append(part)
        if parts:
            device = parts[0].data.device
            shape = ProductShape(tuple(pair), tuple(part.tiles for part in parts), packed[0].shape[1])
            rows = torch.tensor(table, dtype=torch.int32).to(device)
            launches.append(Product(tuple(parts), shape, _LIST_SCALE_SHIFT, torch.stack(scales).to(device), rows))
    return PackedRows(tuple(packed), tuple(out_dtypes), tuple(launches), tuple(offsets), total)


def _join(weights: list[PackedWeight]) -> FormatRows:
    format, scales = weights[0].format, [weight.block_scale for weight in weights if weight.block_scale is not None]
    if format is QuantFormat.FP8_BLOCK128:
        # One row of scales per 64 rows, because matrices are padded to 64 rows, not 128.
        scales = [
            scale.repeat_interleave(2, dim=0)[: weight.data.shape[0] // 4]
            for weight, scale in zip(weights, scales, strict=True)
        ]
    data = weights[0].data if len(weights) == 1 else torch.cat([weight.data for weight in weights])
    return FormatRows(format, data, torch.cat(scales) if scales else None)


def linear(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x · Wᵀ, float32 accumulation, one rounding: see ``dsv4.ops.linear.linear``.

    x bfloat16 ``[T, K]``, y ``[T, N]`` bfloat16 or float32. Up to 8 tokens: products of 4-bit and FP8 weights with x
    are exact in the tensor core, but for values of x below 2^-29 of their token's largest.
    """
    dtype = out_dtype or torch.bfloat16
    _check(x, weight, dtype)
    if x.shape[-1] != weight.shape[-1] or x.dim() != 2:
        raise ValueError(f"x: found width {x.shape[-1]}, expected K = {weight.shape[-1]} of the weight {weight.shape}")
    tokens, rows = x.shape[0], weight.shape[0]
    if tokens > MAX_TOKENS:
        return prefill_linear(x, weight, dtype)
    y = torch.empty((tokens, rows), dtype=dtype, device=x.device)
    if tokens:
        x = _unit_stride(x)
        _prepared(weight, 1, tokens, dtype)(x, x.stride(0), 0, y)
    return y


def grouped_linear(x_TGK: Tensor, weight: PackedWeight) -> Tensor:
    """Block-diagonal linear: see ``dsv4.ops.linear.grouped_linear``. x bfloat16 ``[T, G, K]`` → ``[T, G, R]``."""
    _check_grouped(x_TGK, weight)
    tokens, groups, _ = x_TGK.shape
    if tokens > MAX_TOKENS:
        return prefill_grouped_linear(x_TGK, weight)
    y_TGR = torch.empty((tokens, groups, weight.shape[0] // groups), dtype=torch.bfloat16, device=x_TGK.device)
    if tokens:
        x_TGK = _unit_stride(x_TGK)
        _prepared(weight, groups, tokens, torch.bfloat16)(x_TGK, x_TGK.stride(0), x_TGK.stride(1), y_TGR)
    return y_TGR


def linear_rows(
    x: Tensor, rows: RowList, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> tuple[Tensor, ...]:
    """``linear`` of one x ``[T, K]`` with every matrix of the list: see ``dsv4.ops.linear.linear_rows``.

    Up to 8 tokens it is one launch for at most two formats, norm included, and the products are views of one buffer.
    """
    packed, tokens = _packed_rows(rows), x.shape[0]
    if tokens > MAX_TOKENS:
        _check_rows(x, packed)
        _check_norm(norm_weight, packed.width)
        x = x if norm_weight is None else rms_norm(x, norm_weight, norm_eps)
        return tuple(
            prefill_linear(x, weight, dtype) for weight, dtype in zip(packed.weights, packed.dtypes, strict=True)
        )
    key, norm = (norm_eps, layouts(x)), Norm(norm_weight, norm_eps)
    step = remembered(packed, (norm_weight,), key, _prepare_rows, x, packed, norm)
    # In words, because a view as float32 needs whole ones.
    memory = torch.empty(-(-tokens * packed.bytes_per_token // 4), dtype=torch.float32, device=x.device)
    if tokens:
        if step.norm_first:
            x = rms_norm(x, norm_weight, norm_eps)
        x = _unit_stride(x)
        for launch in step.launches:
            launch(x, x.stride(0), 0, memory)
    typed = {dtype: memory.view(dtype) for dtype in step.dtypes}
    return tuple([typed[dtype].as_strided(size, strides, offset) for dtype, size, strides, offset in step.views])


class _Rows(NamedTuple):
    """A decode step on a row list: whether the norm needs a launch of its own, the others, and the products."""

    norm_first: bool
    launches: list[Launch]
    dtypes: set[torch.dtype]
    views: list[_View]


def _prepare_rows(x: Tensor, rows: PackedRows, norm: Norm) -> _Rows:
    _check_rows(x, rows)
    _check_norm(norm.weight, rows.width)
    tokens, device = x.shape[0], x.device
    plans = [plan_linear(product.shape, tokens, multiprocessors(device)) for product in rows.launches]
    # A block that sees K in slices has no row to normalise.
    norm_first = norm.weight is not None and any(plan.slice_columns < rows.width for plan in plans)
    fused = Norm() if norm_first else norm
    launches = [_prepare(product, tokens, fused, device) for product in rows.launches]
    return _Rows(norm_first, launches, set(rows.dtypes), rows.views(tokens))


def _prepared(weight: PackedWeight, groups: int, tokens: int, dtype: torch.dtype) -> Launch:
    """The launch of ``_prepare_matrix`` with these arguments."""
    arguments = (groups, tokens, dtype)
    return remembered(weight, (), arguments, _prepare_matrix, weight, *arguments)


def _prepare_matrix(weight: PackedWeight, groups: int, tokens: int, dtype: torch.dtype) -> Launch:
    return _prepare(_matrix_product(weight, groups, dtype), tokens, Norm(), weight.device)


def _matrix_product(weight: PackedWeight, groups: int, dtype: torch.dtype) -> Product:
    """The product with one matrix, or with each of its ``groups`` groups of rows."""
    rows = weight.shape[0] // groups
    # Groups that do not begin on a tile boundary compute the tiles they share with a neighbour, and write their rows.
    tiles = -(-rows // TILE_ROWS) + (1 if groups > 1 and rows % TILE_ROWS else 0)
    part = FormatRows(weight.format, weight.data, weight.block_scale)
    shape = ProductShape((weight.format,), (tiles,), weight.shape[1], groups)
    return Product(
        (part,), shape, _STORED_SCALE_SHIFT, weight.global_scale, rows=rows, float32_out=dtype == torch.float32
    )


def _packed_rows(rows: RowList) -> PackedRows:
    """``rows`` as this table packs them. Raises ``ValueError`` for a list of another table."""
    if not isinstance(rows, PackedRows):
        raise ValueError(f"rows: found {type(rows).__name__}, expected the PackedRows of pack_rows")
    return rows


def _check_rows(x: Tensor, rows: PackedRows) -> None:
    """Raises ``ValueError`` when x is not bfloat16 ``[T, K]`` with the K of the list, on its device."""
    _check(x, rows.weights[0], torch.bfloat16)
    if x.dim() != 2 or x.shape[1] != rows.width:
        raise ValueError(f"x: found {tuple(x.shape)}, expected [T, {rows.width}]")


def _check_norm(norm_weight: Tensor | None, width: int) -> None:
    """Raises ``ValueError`` for a norm weight that is not float32 ``[width]``."""
    if norm_weight is not None and (norm_weight.dtype != torch.float32 or norm_weight.shape != (width,)):
        found = f"{norm_weight.dtype} {tuple(norm_weight.shape)}"
        raise ValueError(f"norm_weight: found {found}, expected torch.float32 ({width},)")


def _check_grouped(x_TGK: Tensor, weight: PackedWeight) -> None:
    """Raises ``ValueError`` when x ``[T, G, K]`` and the rows of the weight do not fit."""
    _check(x_TGK, weight, torch.bfloat16)
    if x_TGK.dim() != 3 or weight.shape[0] % x_TGK.shape[1] or x_TGK.shape[2] != weight.shape[1]:
        expected = f"[T, G, {weight.shape[1]}], G a divisor of {weight.shape[0]}"
        raise ValueError(f"x: found {tuple(x_TGK.shape)}, expected {expected}")


def _unit_stride(x: Tensor) -> Tensor:
    """x with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x.dtype}, expected torch.bfloat16")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype: found {out_dtype}, expected torch.bfloat16 or torch.float32")
    if len(weight.shape) != 2:
        raise ValueError(f"weight: found shape {weight.shape}, expected one matrix [N, K]")
    if x.device != weight.device:
        raise ValueError(f"x: found device {x.device}, expected {weight.device} of the weight")


def _prepare(product: Product, tokens: int, norm: Norm, device: torch.device) -> Launch:
    """The launch of a product, to be called with x, its strides between tokens and between groups, and y."""
    plan, formats = plan_linear(product.shape, tokens, multiprocessors(device)), product.formats
    return prepare(
        *("decode_linear", "decode_linear", plan.blocks(product.shape.groups), 32 * plan.tuning.warps),
        *(Tensor, int, int, tokens, norm.weight, float(norm.eps), Tensor),
        *product.arguments(plan),
        *(plan.activation_bytes, plan.partial_bytes),
        device=device,
        cluster=plan.cluster if plan.cluster > 1 else None,
        shared_bytes=plan.shared_bytes,
        defines=(
            ("FORMAT0", formats[0]),
            ("FORMAT1", formats[1]),
            ("FUSED_NORM", int(norm.weight is not None)),
            ("MIN_BLOCKS", plan.tuning.min_blocks),
            *plan.defines,
        ),
    )
