"""Row lists in packed form: matrices that multiply the same x, in memory that one decode launch
reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.launch.constants import FORMAT_CODE
from dsv4.ops.linear import RowList
from dsv4.ops.linear.checks import OUT_DTYPES, check_operands
from dsv4.ops.linear.decode_plan import MAX_MATRICES, ProductShape
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor


@dataclass(frozen=True)
class FormatRows:
    """The matrices of one format of a launch, row tiles one after the other: ``data`` ``[tiles,
    …]``.
    """

    format: QuantFormat
    data: Tensor
    block_scale: Tensor | None

    @property
    def tiles(self) -> int:
        """Row tiles of all matrices together."""
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """With their scales."""
        return self.data.nbytes + (0 if self.block_scale is None else self.block_scale.nbytes)


@dataclass(frozen=True)
class ListLaunch:
    """The matrices of one decode launch: row tiles of at most two formats.

    ``table`` int32 ``[matrices, 4]``: first tile, rows, offset of the product in bytes per token,
    whether it is float32. ``global_scale`` float32 ``[matrices]``.
    """

    parts: tuple[FormatRows, ...]
    shape: ProductShape
    table: Tensor
    global_scale: Tensor

    @property
    def nbytes(self) -> int:
        """What a launch of all rows reads."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class PackedRows(RowList):
    """A row list whose matrices share memory by format. ``offsets[i]``: bytes per token before
    product i.
    """

    weights: tuple[PackedWeight, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    launches: tuple[ListLaunch, ...]
    offsets: tuple[int, ...]
    bytes_per_token: int

    @property
    def width(self) -> int:
        """K, the columns of every matrix."""
        return self.weights[0].shape[1]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the products."""
        return [dtype or torch.bfloat16 for dtype in self.out_dtypes]

    def shape_of(self, launch: ListLaunch) -> ProductShape:
        """``launch.shape``, with the matrices that serve the indexer's choice as later tiles where
        all matrices have one format.
        """
        if len(self.launches) > 1 or len(launch.parts) > 1:
            return launch.shape
        chosen = self.weights[len(self.weights) - self.for_choice :]
        later = sum(weight.data.shape[0] for weight in chosen)
        (tiles,) = launch.shape.tiles
        return launch.shape._replace(tiles=(tiles - later,), later=later)

    def first_tile(self, launch: ListLaunch) -> int:
        """Where the first matrix begins among the tiles of its launch."""
        formats = [part.format for part in launch.parts]
        return sum(part.tiles for part in launch.parts[: formats.index(self.weights[0].format)])

    def check(self, x: Tensor) -> None:
        """Raises ``ValueError`` when x is not bfloat16 ``[T, K]`` with the K of the list."""
        check_operands(x, self.weights[0], torch.bfloat16)
        if x.dim() != 2 or x.shape[1] != self.width:
            raise ValueError(f"x: found {tuple(x.shape)}, expected [T, {self.width}]")

    def products(self, memory: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """The products ``[T, N_i]`` in float32 ``memory`` that they share."""
        views = []
        for weight, dtype, offset in zip(self.weights, self.dtypes, self.offsets, strict=True):
            rows = weight.shape[0]
            first = tokens * offset // dtype.itemsize
            views.append(memory.view(dtype).as_strided((tokens, rows), (rows, 1), first))
        return tuple(views)


def packed_rows(rows: RowList) -> PackedRows:
    """``rows`` as ``pack_rows`` made them. Raises ``ValueError`` for a list of another table."""
    if not isinstance(rows, PackedRows):
        raise ValueError(f"rows: found {type(rows).__name__}, expected the PackedRows of pack_rows")
    return rows


def pack_rows(
    weights: Sequence[QuantTensor],
    out_dtypes: Sequence[torch.dtype | None],
    pack: Callable[[QuantTensor], PackedWeight] = pack_weight,
) -> PackedRows:
    """Packs up to 8 matrices of one K for ``linear_rows`` by ``pack``.

    Raises ``ValueError`` when the widths differ or a dtype is neither None, bfloat16 nor float32.
    """
    return _joined([pack(weight) for weight in weights], out_dtypes)


def choose_rows(chosen: Sequence[tuple[RowList, int]]) -> RowList:
    """A list of the matrices ``(rows, index)``; those of packed lists are copied."""
    weights = [rows.weights[index] for rows, index in chosen]
    dtypes = [rows.out_dtypes[index] for rows, index in chosen]
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) < len(weights):
        return RowList(tuple(weights), tuple(dtypes))
    return _joined(packed, dtypes)


def _joined(packed: list[PackedWeight], out_dtypes: Sequence[torch.dtype | None]) -> PackedRows:
    if not 1 <= len(packed) <= MAX_MATRICES or len({weight.shape[1] for weight in packed}) != 1:
        shapes = [weight.shape for weight in packed]
        expected = f"1 to {MAX_MATRICES} matrices of one K"
        raise ValueError(f"weights: found shapes {shapes}, expected {expected}")
    dtypes = [torch.bfloat16 if dtype is None else dtype for dtype in out_dtypes]
    if len(dtypes) != len(packed) or not set(dtypes) <= set(OUT_DTYPES):
        expected = f"{len(packed)} of None, bfloat16, float32"
        raise ValueError(f"out_dtypes: found {out_dtypes}, expected {expected}")
    offsets, total = _offsets(packed, dtypes)
    formats = sorted({weight.format for weight in packed}, key=FORMAT_CODE.__getitem__)
    pairs = [pair for pair in (formats[:2], formats[2:]) if pair]
    launches = [_join_formats(packed, dtypes, offsets, pair) for pair in pairs]
    return PackedRows(tuple(packed), tuple(out_dtypes), tuple(launches), tuple(offsets), total)


def _offsets(weights: list[PackedWeight], dtypes: list[torch.dtype]) -> tuple[list[int], int]:
    """Bytes per token before each product, and of all.

    float32 products lie first, so that each starts on a multiple of its element size for every
    number of tokens.
    """
    offsets = [0] * len(weights)
    total = 0
    for index in sorted(range(len(weights)), key=lambda index: -dtypes[index].itemsize):
        offsets[index] = total
        total += weights[index].shape[0] * dtypes[index].itemsize
    return offsets, total


def _join_formats(
    packed: list[PackedWeight],
    dtypes: list[torch.dtype],
    offsets: list[int],
    formats: list[QuantFormat],
) -> ListLaunch:
    """The launch of the matrices of these formats, whose entries in ``packed`` become parts of its
    memory.
    """
    device = packed[0].device
    parts = []
    table = []
    scales = []
    first = 0
    for format in formats:
        members = [index for index, weight in enumerate(packed) if weight.format is format]
        part = _join([packed[index] for index in members])
        start = 0
        for index in members:
            weight = packed[index]
            tiles = weight.data.shape[0]
            is_float32 = int(dtypes[index] == torch.float32)
            table.append([first + start, weight.shape[0], offsets[index], is_float32])
            scales.append(weight.global_scale)
            packed[index] = replace(weight, data=part.data[start : start + tiles])
            start += tiles
        first += start
        parts.append(part)
    shape = ProductShape(tuple(formats), tuple(part.tiles for part in parts), packed[0].shape[1])
    one = torch.ones((), dtype=torch.float32, device=device)
    global_scale = _join_tensors([(one if scale is None else scale).view(1) for scale in scales])
    rows = torch.tensor(table, dtype=torch.int32).to(device)
    return ListLaunch(tuple(parts), shape, rows, global_scale)


def _join(weights: list[PackedWeight]) -> FormatRows:
    format = weights[0].format
    scales = [weight.block_scale for weight in weights if weight.block_scale is not None]
    if format is QuantFormat.FP8_BLOCK128:
        # One row of scales per 64 rows, because matrices are padded to 64 rows, not 128.
        scales = [
            scale.repeat_interleave(2, dim=0)[: weight.data.shape[0] // 4]
            for weight, scale in zip(weights, scales, strict=True)
        ]
    data = _join_tensors([weight.data for weight in weights])
    return FormatRows(format, data, _join_tensors(scales) if scales else None)


def _join_tensors(tensors: list[Tensor]) -> Tensor:
    """One after the other along the first dimension."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if first.is_meta:
        # torch.cat on the meta device imports hundreds of modules of torch.
        return first.new_empty((sum(part.shape[0] for part in tensors), *first.shape[1:]))
    return torch.cat(tensors)
