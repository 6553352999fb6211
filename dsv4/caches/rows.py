"""RowCache: key rows in device memory, quantised or plain, addressed by slot.

The byte layouts of cached rows live here and nowhere else (model.md#cache-rows). Reading a row
always gives the values that attention sees, so a token attends to its own key after the round trip
through the cache.
"""

import enum
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.weights.codes import E4M3_MAX, ceil_power_of_two_exponent, e8m0_to_float, exponent_to_e8m0

KV_GROUP = 64


class RowFormat(enum.Enum):
    """How a row of ``width`` values, the last ``rope_width`` of them rotary, is stored.

    KV_FP8: data uint8 ``[S, N + 2R]`` = N = width − R values e4m3, then R values bfloat16;
    block_scale uint8 ``[S, 8·⌈G/8⌉]``, one E8M0 byte per 64 of the N values (G groups), the rest 0.
    576 + 8 bytes for 448 + 64. INDEX_FP8: data uint8 ``[S, width]`` e4m3; block_scale float32 ``[S,
    1]`` = amax / 448. 132 bytes for 128. PLAIN: data ``[S, width]`` bfloat16 or float32, not
    quantised.
    """

    KV_FP8 = "kv_fp8"
    INDEX_FP8 = "index_fp8"
    PLAIN = "plain"


@dataclass(frozen=True)
class RowCache:
    """``S`` slots of key rows. Owned by ``DecodeState``; written and read in place by the ops."""

    data: Tensor
    block_scale: Tensor | None
    format: RowFormat
    width: int
    rope_width: int

    @classmethod
    def allocate(
        cls,
        slots: int,
        width: int,
        rope_width: int,
        format: RowFormat,
        plain_dtype: torch.dtype,
        device: torch.device,
    ) -> "RowCache":
        """A zeroed cache; ``plain_dtype`` is the dtype of PLAIN rows."""
        shapes = row_shapes(width, rope_width, format, plain_dtype)
        data, scale = (
            None if shape is None else torch.zeros((slots, shape[0]), dtype=shape[1], device=device)
            for shape in shapes
        )
        assert data is not None
        return cls(data, scale, format, width, rope_width)

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.block_scale is None else self.block_scale.nbytes)

    def first(self, slots: int) -> "RowCache":
        """The first ``slots`` slots."""
        scale = None if self.block_scale is None else self.block_scale[:slots]
        return replace(self, data=self.data[:slots], block_scale=scale)

    def read(self, slots: Tensor) -> Tensor:
        """Dequantised float32 rows ``[..., width]`` of int64 ``slots`` ``[...]``."""
        scale = None if self.block_scale is None else self.block_scale[slots]
        return self._dequantize(self.data[slots], scale)

    def read_all(self) -> Tensor:
        """All rows, dequantised, float32 ``[S, width]``."""
        return self._dequantize(self.data, self.block_scale)

    def write(self, slots: Tensor, rows: Tensor, where: Tensor | None = None) -> None:
        """Stores float ``rows`` ``[n, width]`` in distinct ``slots`` ``[n]``; rows whose ``where``
        is false keep their bytes.
        """
        parts = zip((self.data, self.block_scale), self._quantize(rows), strict=True)
        for store, new in parts:
            if store is None or new is None:
                continue
            if where is not None:
                new = torch.where(where[:, None], new, store[slots])
            store.index_copy_(0, slots, new)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.format is RowFormat.KV_FP8:
            return pack_kv_rows(rows, self.rope_width)
        if self.format is RowFormat.INDEX_FP8:
            return pack_index_rows(rows)
        return rows.to(self.data.dtype), None

    def _dequantize(self, data: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return data.float()
        if self.format is RowFormat.KV_FP8:
            return unpack_kv_rows(data, scale, self.rope_width)
        return unpack_index_rows(data, scale)


def row_shapes(
    width: int, rope_width: int, format: RowFormat, plain_dtype: torch.dtype
) -> tuple[tuple[int, torch.dtype], tuple[int, torch.dtype] | None]:
    """(columns, dtype) of ``data`` and of ``block_scale`` (None: absent)."""
    if format is RowFormat.KV_FP8:
        quantised = width - rope_width
        scale_columns = 8 * math.ceil(math.ceil(quantised / KV_GROUP) / 8)
        return (quantised + 2 * rope_width, torch.uint8), (scale_columns, torch.uint8)
    if format is RowFormat.INDEX_FP8:
        return (width, torch.uint8), (1, torch.float32)
    return (width, plain_dtype), None


def pack_kv_rows(rows: Tensor, rope_width: int) -> tuple[Tensor, Tensor]:
    """Float ``[..., D]`` to (data, block_scale) of ``RowFormat.KV_FP8``, every 64 values with a
    scale of 2^⌈log2(max(amax, 1e-4) / 448)⌉.
    """
    quantised = rows.shape[-1] - rope_width
    groups = _in_groups(rows[..., :quantised].float())
    amax = groups.abs().amax(-1).clamp(min=1e-4)
    scale = exponent_to_e8m0(ceil_power_of_two_exponent(amax * (1 / E4M3_MAX)))
    scaled = (groups / e8m0_to_float(scale).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    codes = (
        scaled.to(torch.float8_e4m3fn).flatten(-2)[..., :quantised].contiguous().view(torch.uint8)
    )
    rotary = rows[..., quantised:].to(torch.bfloat16).contiguous().view(torch.uint8)
    padded_scale = torch.nn.functional.pad(scale.view(torch.uint8), (0, -scale.shape[-1] % 8))
    return torch.cat((codes, rotary), dim=-1), padded_scale


def unpack_kv_rows(data: Tensor, block_scale: Tensor, rope_width: int) -> Tensor:
    """Inverse of ``pack_kv_rows`` up to the rounding it did: float32 ``[..., D]``."""
    quantised = data.shape[-1] - 2 * rope_width
    groups = _in_groups(data[..., :quantised].contiguous().view(torch.float8_e4m3fn).float())
    scale = e8m0_to_float(
        block_scale[..., : groups.shape[-2]].contiguous().view(torch.float8_e8m0fnu)
    )
    values = (groups * scale.unsqueeze(-1)).flatten(-2)[..., :quantised]
    # A copy: one row alone is contiguous, and begins at an odd byte where N is odd.
    rotary = data[..., quantised:].clone(memory_format=torch.contiguous_format)
    rotary = rotary.view(torch.bfloat16).float()
    return torch.cat((values, rotary), dim=-1)


def pack_index_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Float ``[..., D]`` to (uint8 e4m3 ``[..., D]``, float32 scale ``[..., 1]`` = amax / 448, 1
    for a zero row).
    """
    rows = rows.float()
    amax = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    return (rows / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(
        torch.uint8
    ), scale


def unpack_index_rows(data: Tensor, scale: Tensor) -> Tensor:
    """Inverse of ``pack_index_rows`` up to the rounding it did: float32 ``[..., D]``."""
    return data.view(torch.float8_e4m3fn).float() * scale


def _in_groups(values: Tensor) -> Tensor:
    """``[..., N]`` to ``[..., ⌈N/64⌉, 64]``, zero padded."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % KV_GROUP)).unflatten(
        -1, (-1, KV_GROUP)
    )
