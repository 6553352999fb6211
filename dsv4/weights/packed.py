"""PackedWeight: the device layout of weight matrices, read alike by the decode and the prefill
kernels.

Row tiles of 16 rows and chunks of ``chunk_columns(format)`` columns lie in the order of the A
fragment of ``mma.m16n8k16``, so that one warp-wide 16-byte load reads 512 contiguous bytes. Lane l
= 4·g + t; register r, half h of MMA step s in a chunk: row = 16·tile + g + 8·(r & 1), column =
chunk_columns·chunk + 16·s + 2·t + h + 8·(r >> 1).

* 4-bit: 32-bit word s of the lane's 16 bytes is step s, its low and high half are h = 0 and 1, each
  with the codes of the four registers: r0 {sign bit 15, magnitude bits 11-9}, r1 {12, 8-6}, r2 {14,
  5-3}, r3 {13, 2-0}.
* FP8: byte 8·s + 2·r + h. BF16: 2-byte value 2·r + h.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dsv4.integers import round_up
from dsv4.weights.codes import e8m0_to_float
from dsv4.weights.quant import QuantFormat, QuantTensor, ValuesLost, WeightParts, packed_shapes

TILE_ROWS = 16
PADDING = 64
# Matrices of a stack are packed together up to this many stored bytes: few large operations.
GROUP_BYTES = 32 << 20
LANES = 32
LANE_BYTES = 16
# Shifts of (magnitude, sign) into the 16-bit half, by register.
_CODE_BITS = ((9, 15), (6, 12), (3, 14), (0, 13))
# The exponent's bits of a float32; all of them are infinity.
_EXPONENT = 0x7F800000
_FORMATS = (QuantFormat.NVFP4, QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128, QuantFormat.BF16)


@dataclass(frozen=True)
class PackedWeight(WeightParts):
    """A weight ``[..., N, K]`` in fragment order, N and K padded to multiples of 64 with zero codes
    and scales.

    ``data`` uint8 ``[..., N/16, K/chunk_columns, 32, 16]``. ``block_scale``: NVFP4 uint8 (E4M3)
    ``[..., N/16, K/64, 8, 8]``, byte 2·s + j of g for row g + 8·j and the s-th 16 columns; MXFP4
    uint8 (E8M0 bits) ``[..., N/16, K/64, 8, 4]``, byte 2·s + j for the s-th 32 columns; FP8 float32
    ``[..., ⌈N/128⌉, ⌈K/128⌉]``; BF16 none. ``global_scale``: float32 per matrix for NVFP4, else
    None. ``shape`` is the logical shape. ``power_of_two_scales``: FP8 block scales are powers of
    two or zero; False where nobody has looked.
    """

    power_of_two_scales: bool = False

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(
                f"format: found {self.format.value}, expected one of {[f.value for f in _FORMATS]}"
            )
        for name, part, shape, dtype in self._expected_parts():
            if (part is None) != (shape is None):
                raise ValueError(
                    f"{name}: {'missing' if part is None else 'not part of this format'}"
                )
            if part is not None and (tuple(part.shape) != shape or part.dtype != dtype):
                raise ValueError(
                    f"{name}: found {part.dtype} {tuple(part.shape)}, expected {dtype} {shape}"
                )

    def _expected_parts(
        self,
    ) -> list[tuple[str, Tensor | None, tuple[int, ...] | None, torch.dtype]]:
        *stack, rows, columns = self.shape
        tiles = padded(rows) // TILE_ROWS
        chunks = padded(columns) // PADDING
        scale_shape = None
        scale_dtype = torch.uint8
        if self.format is QuantFormat.FP8_BLOCK128:
            scale_shape = packed_shapes(self.format, self.shape)["block_scale"]
            scale_dtype = torch.float32
        elif self.format is not QuantFormat.BF16:
            scale_shape = (*stack, tiles, chunks, 8, 8 if self.format is QuantFormat.NVFP4 else 4)
        data_shape = (
            *stack,
            tiles,
            padded(columns) // chunk_columns(self.format),
            LANES,
            LANE_BYTES,
        )
        return [
            ("data", self.data, data_shape, torch.uint8),
            ("block_scale", self.block_scale, scale_shape, scale_dtype),
            (
                "global_scale",
                self.global_scale,
                tuple(stack) if self.format is QuantFormat.NVFP4 else None,
                torch.float32,
            ),
        ]

    def __getitem__(self, index: int) -> Self:
        """One matrix of a stack along the first dimension, without a copy."""
        return replace(super().__getitem__(index), power_of_two_scales=self.power_of_two_scales)

    def unpack(self) -> QuantTensor:
        """The stored form again; FP8 with float32 block scales, a packed F32 weight as BF16."""
        *stack, rows, columns = self.shape
        data = {
            QuantFormat.NVFP4: _unpack_codes,
            QuantFormat.MXFP4: _unpack_codes,
            QuantFormat.FP8_BLOCK128: _unpack_bytes,
            QuantFormat.BF16: _unpack_bf16,
        }[self.format](self.data)
        width = columns // 2 if self.format.group_size else columns
        data = data[..., :rows, :width].contiguous()
        return QuantTensor(
            data, self._unpack_block_scale(), self.global_scale, self.format, self.shape
        )

    def _unpack_block_scale(self) -> Tensor | None:
        *_, rows, columns = self.shape
        if self.block_scale is None or self.format.group_size is None:
            return self.block_scale
        # [..., tile, chunk, g, s, j] to [..., tile, j, g, chunk, s]
        scale = self.block_scale.unflatten(-1, (-1, 2)).movedim(-1, -4).movedim(-3, -2)
        scale = scale.flatten(-2).flatten(-4, -2)
        scale = scale[..., :rows, : columns // self.format.group_size].contiguous()
        return scale.view(
            torch.float8_e4m3fn if self.format is QuantFormat.NVFP4 else torch.float8_e8m0fnu
        )

    def dequantize(self) -> Tensor:
        """The values as float32 ``[..., N, K]``, bitwise those of the stored weight."""
        return self.unpack().dequantize()


def padded(size: int) -> int:
    """``size`` rounded up to the multiple of 64 that rows and columns are stored in."""
    return round_up(size, PADDING)


def chunk_columns(format: QuantFormat) -> int:
    """Columns that one warp-wide 16-byte load covers for 16 rows."""
    return {QuantFormat.FP8_BLOCK128: 32, QuantFormat.BF16: 16}.get(format, 64)


def matrices_at_once(nbytes: int) -> int:
    """How many matrices of as many stored bytes are packed together."""
    return max(1, GROUP_BYTES // nbytes)


def pack_weight(weight: QuantTensor) -> PackedWeight:
    """Repacks a stored weight ``[..., N, K]``, some matrices of a stack at a time, on the device it
    lies on.

    On the meta device only the shapes are made. An F32 weight is stored as BF16. Raises
    ``ValuesLost`` when that would change a value.
    """
    if weight.format is QuantFormat.F32:
        rounded = weight.data.bfloat16()
        if not rounded.is_meta and not torch.equal(rounded.float(), weight.data):
            raise ValuesLost(
                "weight: found an F32 weight, expected values that bfloat16 represents exactly"
            )
        weight = QuantTensor.dense(rounded)
    *stack, rows, columns = weight.shape
    pack = {
        QuantFormat.NVFP4: _pack_codes,
        QuantFormat.MXFP4: _pack_codes,
        QuantFormat.FP8_BLOCK128: _pack_bytes,
        QuantFormat.BF16: _pack_bf16,
    }[weight.format]
    chunks = padded(columns) // chunk_columns(weight.format)
    shape = (padded(rows) // TILE_ROWS, chunks, LANES, LANE_BYTES)
    matrices = weight.data.reshape(-1, *weight.data.shape[-2:])
    data = torch.empty((matrices.shape[0], *shape), dtype=torch.uint8, device=weight.device)
    if not data.is_meta:
        count = matrices_at_once(matrices[0].nbytes)
        tables = _word_tables(weight.device) if weight.format.group_size else []
        for packed, stored in zip(data.split(count), matrices.split(count), strict=True):
            packed.copy_(pack(stored, *tables).view(packed.shape))
    scale = _pack_block_scale(weight)
    return PackedWeight(
        data.view(*stack, *shape),
        scale,
        weight.global_scale,
        weight.format,
        weight.shape,
        weight.format is QuantFormat.FP8_BLOCK128 and _has_power_of_two_scales(weight),
    )


def _has_power_of_two_scales(weight: QuantTensor) -> bool:
    """Whether FP8 block scales are powers of two or zero; float32 ones on the meta device are not
    known to be.
    """
    scale = weight.block_scale
    if scale is None or scale.dtype == torch.float8_e8m0fnu or scale.is_meta:
        return scale is not None and scale.dtype == torch.float8_e8m0fnu
    bits = scale.view(torch.int32)
    is_power = (bits & ~_EXPONENT) == 0
    return bool((is_power & (bits != _EXPONENT)).all())


def _pack_block_scale(weight: QuantTensor) -> Tensor | None:
    scale = weight.block_scale
    if scale is None or weight.format.group_size is None:
        if scale is not None and scale.dtype == torch.float8_e8m0fnu:
            # Arithmetic on the meta device imports hundreds of modules of torch.
            return scale.float() if scale.is_meta else e8m0_to_float(scale)
        return None if scale is None else scale.contiguous()
    per_chunk = PADDING // weight.format.group_size
    scale = _pad(scale.view(torch.uint8), per_chunk)
    # [..., tile, j, g, chunk, s] to [..., tile, chunk, g, s, j]
    scale = scale.unflatten(-1, (-1, per_chunk)).unflatten(-3, (-1, 2, 8))
    return scale.movedim(-2, -4).movedim(-3, -1).flatten(-2).contiguous()


def _pad(matrix: Tensor, column_multiple: int) -> Tensor:
    rows, columns = matrix.shape[-2:]
    missing = (0, -columns % column_multiple, 0, -rows % PADDING)
    # Padding by nothing would be a copy.
    return torch.nn.functional.pad(matrix, missing) if any(missing) else matrix


def _pack_codes(matrices: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """uint8 ``[B, N, K/2]`` to int32 ``[B, N/16, K/64, 8 (g), 4 (t), 4 (s)]``, as bytes; ``low``
    and ``high`` are the ``_word_tables``.
    """
    # Columns 2·t + h of an MMA step are byte t: [B, tile, j, g, chunk, s, r >> 1, t].
    fields = _pad(matrices, PADDING // 2).unflatten(-1, (-1, 4, 2, 4)).unflatten(1, (-1, 2, 8))
    # Registers r of a word come in pairs of bytes, j = r & 1: [r >> 1, B, tile, chunk, g, t, s, j].
    pairs = fields.permute(6, 0, 1, 4, 3, 7, 5, 2).contiguous().view(torch.int16).squeeze(-1)
    words = None
    for pair, table in zip(pairs, (low, high), strict=True):
        index = pair.reshape(-1).to(torch.int32).add_(1 << 15)
        of_pair = table.index_select(0, index)
        words = of_pair if words is None else words.bitwise_or_(of_pair)
    assert words is not None
    return words.view(torch.uint8)


def _word_tables(device: torch.device) -> list[Tensor]:
    """What the bytes of registers 2·p and 2·p + 1 put into a word: for p = 0 and 1 int32 ``[2^16]``
    at the pair as a signed number, low byte first, plus 2^15.
    """
    pair = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device)
    tables = []
    for first in (0, 2):
        word = torch.zeros_like(pair)
        for byte, (magnitude_shift, sign_shift) in enumerate(_CODE_BITS[first : first + 2]):
            codes = (pair >> 8 * byte) & 0xFF
            halves = (codes & 0xF) | (codes >> 4 << 16)
            word |= ((halves & 0x70007) << magnitude_shift) | (
                ((halves >> 3) & 0x10001) << sign_shift
            )
        tables.append(word)
    return tables


def _unpack_codes(data: Tensor) -> Tensor:
    words = data.view(torch.int32).unflatten(-2, (8, 4))
    registers = []
    for magnitude_shift, sign_shift in _CODE_BITS:
        halves = ((words >> magnitude_shift) & 0x70007) | (((words >> sign_shift) & 0x10001) << 3)
        registers.append(((halves & 0xF) | (halves >> 12)).to(torch.uint8))
    # [..., tile, chunk, g, t, s, r >> 1, j] to [..., tile, j, g, chunk, s, r >> 1, t]
    fields = torch.stack(registers, dim=-1).unflatten(-1, (2, 2))
    return fields.movedim(-1, -6).movedim(-5, -4).movedim(-3, -1).flatten(-4).flatten(-4, -2)


def _pack_bytes(matrices: Tensor) -> Tensor:
    """FP8 ``[B, N, K]`` to uint8 ``[B, N/16, K/32, 8 (g), 4 (t), 2 (s), 2 (r >> 1), 2 (j), 2
    (h)]``.
    """
    padded_bytes = _pad(matrices.view(torch.uint8), PADDING)
    fields = padded_bytes.unflatten(-1, (-1, 2, 2, 4, 2)).unflatten(1, (-1, 2, 8))
    return fields.permute(0, 1, 4, 3, 7, 5, 6, 2, 8).contiguous()


def _unpack_bytes(data: Tensor) -> Tensor:
    fields = data.unflatten(-1, (2, 2, 2, 2)).unflatten(-5, (8, 4))
    # [..., tile, chunk, g, t, s, r >> 1, j, h] to [..., tile, j, g, chunk, s, r >> 1, t, h]
    fields = fields.movedim(-2, -7).movedim(-6, -5).movedim(-4, -2)
    return fields.flatten(-5).flatten(-4, -2).view(torch.float8_e4m3fn)


def _pack_bf16(matrices: Tensor) -> Tensor:
    """BF16 ``[B, N, K]`` to ``[B, N/16, K/16, 8 (g), 4 (t), 2 (r >> 1), 2 (j), 2 (h)]``, as
    bytes.
    """
    fields = _pad(matrices, PADDING).unflatten(-1, (-1, 2, 4, 2)).unflatten(1, (-1, 2, 8))
    return fields.permute(0, 1, 4, 3, 6, 5, 2, 7).contiguous().view(torch.uint8)


def _unpack_bf16(data: Tensor) -> Tensor:
    fields = data.view(torch.bfloat16).unflatten(-1, (2, 2, 2)).unflatten(-4, (8, 4))
    # [..., tile, chunk, g, t, r >> 1, j, h] to [..., tile, j, g, chunk, r >> 1, t, h]
    fields = fields.movedim(-2, -6).movedim(-5, -4).movedim(-3, -2)
    return fields.flatten(-4).flatten(-4, -2)
