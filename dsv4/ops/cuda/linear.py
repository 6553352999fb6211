"""Weight-only linear layers on packed weights: one launch per call for up to 8 tokens, GEMMs for more."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.cuda.linear_plan import FORMAT_CODES, MAX_MATRICES, MAX_TOKENS, LinearPlan, plan_linear
from dsv4.kernels.cuda.loader import launch, multiprocessors
from dsv4.ops.cuda.norm import rms_norm
from dsv4.ops.cuda.packed import TILE_ROWS, PackedWeight, pack_weight
from dsv4.ops.cuda.prefill_linear import prefill_grouped_linear, prefill_linear
from dsv4.ops.linear import RowList
from dsv4.quant import QuantFormat, QuantTensor

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


@dataclass(frozen=True)
class RowLaunch:
    """One launch: at most two formats. ``table`` int32 ``[matrices, 4]``: first tile, rows, offset of the product in
    bytes per token, whether it is float32. ``global_scale`` float32 ``[matrices]``.
    """

    parts: tuple[FormatRows, ...]
    table: Tensor
    global_scale: Tensor


@dataclass(frozen=True)
class PackedRows(RowList):
    """A row list whose matrices share memory by format. ``offsets[i]``: bytes per token before product i."""

    weights: tuple[PackedWeight, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    launches: tuple[RowLaunch, ...]
    offsets: tuple[int, ...]
    bytes_per_token: int


def pack_rows(weights: Sequence[QuantTensor], out_dtypes: Sequence[torch.dtype | None]) -> PackedRows:
    """Packs up to 8 matrices of one K for ``linear_rows``; see ``pack_weight``.

    Raises ``ValueError`` when the widths differ or a dtype is neither None, bfloat16 nor float32.
    """
    packed = [pack_weight(weight) for weight in weights]
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
            rows = torch.tensor(table, dtype=torch.int32).to(device)
            launches.append(RowLaunch(tuple(parts), rows, torch.stack(scales).to(device)))
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
        _launch_matrix(x, x.stride(0), 0, 1, weight, y)
    return y


def grouped_linear(x_TGK: Tensor, weight: PackedWeight) -> Tensor:
    """Block-diagonal linear: see ``dsv4.ops.linear.grouped_linear``. x bfloat16 ``[T, G, K]`` → ``[T, G, R]``."""
    _check(x_TGK, weight, torch.bfloat16)
    if x_TGK.dim() != 3 or weight.shape[0] % x_TGK.shape[1] or x_TGK.shape[2] != weight.shape[1]:
        expected = f"[T, G, {weight.shape[1]}], G a divisor of {weight.shape[0]}"
        raise ValueError(f"x: found {tuple(x_TGK.shape)}, expected {expected}")
    tokens, groups, _ = x_TGK.shape
    if tokens > MAX_TOKENS:
        return prefill_grouped_linear(x_TGK, weight)
    y_TGR = torch.empty((tokens, groups, weight.shape[0] // groups), dtype=torch.bfloat16, device=x_TGK.device)
    if tokens:
        x_TGK = _unit_stride(x_TGK)
        _launch_matrix(x_TGK, x_TGK.stride(0), x_TGK.stride(1), groups, weight, y_TGR)
    return y_TGR


def linear_rows(
    x: Tensor, rows: RowList, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> tuple[Tensor, ...]:
    """``linear`` of one x ``[T, K]`` with every matrix of the list: see ``dsv4.ops.linear.linear_rows``.

    Up to 8 tokens it is one launch for at most two formats, norm included, and the products are views of one buffer.
    """
    if not isinstance(rows, PackedRows):
        raise ValueError(f"rows: found {type(rows).__name__}, expected the PackedRows of pack_rows")
    _check(x, rows.weights[0], torch.bfloat16)
    width = rows.weights[0].shape[1]
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"x: found {tuple(x.shape)}, expected [T, {width}]")
    if norm_weight is not None and (norm_weight.dtype != torch.float32 or norm_weight.shape != (width,)):
        found = f"{norm_weight.dtype} {tuple(norm_weight.shape)}"
        raise ValueError(f"norm_weight: found {found}, expected torch.float32 ({width},)")
    tokens = x.shape[0]
    dtypes = [dtype or torch.bfloat16 for dtype in rows.out_dtypes]
    if tokens > MAX_TOKENS:
        x = x if norm_weight is None else rms_norm(x, norm_weight, norm_eps)
        return tuple(prefill_linear(x, weight, dtype) for weight, dtype in zip(rows.weights, dtypes, strict=True))
    y = torch.empty(tokens * rows.bytes_per_token, dtype=torch.uint8, device=x.device)
    if tokens:
        _launch_rows(_unit_stride(x), rows, norm_weight, norm_eps, y)
    products = []
    for weight, dtype, offset in zip(rows.weights, dtypes, rows.offsets, strict=True):
        part = y[tokens * offset : tokens * (offset + weight.shape[0] * dtype.itemsize)]
        products.append(part.view(dtype).view(tokens, weight.shape[0]))
    return tuple(products)


def _check(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x.dtype}, expected torch.bfloat16")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype: found {out_dtype}, expected torch.bfloat16 or torch.float32")
    if len(weight.shape) != 2:
        raise ValueError(f"weight: found shape {weight.shape}, expected one matrix [N, K]")
    if x.device != weight.device:
        raise ValueError(f"x: found device {x.device}, expected {weight.device} of the weight")


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_matrix(x: Tensor, row_stride: int, group_stride: int, groups: int, weight: PackedWeight, y: Tensor) -> None:
    rows = weight.shape[0] // groups
    # Groups that do not begin on a tile boundary compute the tiles they share with a neighbour, and write their rows.
    tiles = -(-rows // TILE_ROWS) + (1 if groups > 1 and rows % TILE_ROWS else 0)
    part = FormatRows(weight.format, weight.data, weight.block_scale)
    plan = plan_linear((weight.format,), (tiles,), weight.shape[1], groups, x.shape[0], multiprocessors(x.device))
    matrix = (_STORED_SCALE_SHIFT, weight.global_scale, None, 1, rows, int(y.dtype == torch.float32))
    _launch(x, (row_stride, group_stride, weight.shape[1]), (part,), (tiles,), groups, None, 0.0, y, matrix, plan)


def _launch_rows(x: Tensor, rows: PackedRows, norm_weight: Tensor | None, norm_eps: float, y: Tensor) -> None:
    width = rows.weights[0].shape[1]
    plans = [
        plan_linear(
            tuple(part.format for part in listed.parts),
            tuple(part.tiles for part in listed.parts),
            width,
            1,
            x.shape[0],
            multiprocessors(x.device),
        )
        for listed in rows.launches
    ]
    if norm_weight is not None and any(plan.slice_columns < width for plan in plans):
        # A block that sees K in slices has no row to normalise.
        x, norm_weight = rms_norm(x, norm_weight, norm_eps), None
    for listed, plan in zip(rows.launches, plans, strict=True):
        matrices = (_LIST_SCALE_SHIFT, listed.global_scale, listed.table, listed.table.shape[0], 0, 0)
        tiles = tuple(part.tiles for part in listed.parts)
        strides = (x.stride(0), 0, width)
        _launch(x, strides, listed.parts, tiles, 1, norm_weight, norm_eps, y, matrices, plan)


def _launch(
    x: Tensor,
    strides_and_width: tuple[int, int, int],
    parts: tuple[FormatRows, ...],
    tiles: tuple[int, ...],
    groups: int,
    norm_weight: Tensor | None,
    norm_eps: float,
    y: Tensor,
    matrices: tuple[int | Tensor | None, ...],
    plan: LinearPlan,
) -> None:
    row_stride, group_stride, width = strides_and_width
    first, second = parts[0], parts[1] if len(parts) > 1 else None
    launch(
        "decode_linear",
        "decode_linear",
        plan.cluster * (groups * plan.clusters[0] + sum(plan.clusters[1:])),
        32 * (plan.tuning.warps + (plan.tuning.prefetch_megabytes > 0)),
        *(x, row_stride, group_stride, x.shape[0], width, plan.slice_columns, norm_weight, float(norm_eps), y),
        *(first.data, first.block_scale, tiles[0], plan.clusters[0], groups),
        *((None, None, 0, 0) if second is None else (second.data, second.block_scale, tiles[1], plan.clusters[1])),
        *matrices,
        plan.activation_bytes,
        plan.partial_bytes,
        device=x.device,
        cluster=plan.cluster if plan.cluster > 1 else None,
        shared_bytes=plan.shared_bytes,
        defines=(
            ("FORMAT0", FORMAT_CODES[first.format]),
            ("FORMAT1", -1 if second is None else FORMAT_CODES[second.format]),
            ("PADDED_TOKENS", plan.padded_tokens),
            ("FUSED_NORM", int(norm_weight is not None)),
            ("RAGGED_K", int(plan.ragged)),
            ("WARPS", plan.tuning.warps),
            ("DEPTH", plan.tuning.depth),
            ("MIN_BLOCKS", plan.tuning.min_blocks),
            ("PREFETCH_MB", plan.tuning.prefetch_megabytes),
            ("CLUSTER", plan.cluster),
            ("ROTATE", plan.tuning.rotate),
        ),
    )
