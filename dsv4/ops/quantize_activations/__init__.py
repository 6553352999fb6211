"""Activations in 8 and 4 bit: which weights take which format, and what the bytes are
(docs/numerics.md). A row's bytes depend on no other row.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.integers import round_up
from dsv4.weights.codes import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_power_of_two_exponent,
    e8m0_to_float,
    exponent_to_e8m0,
    pack_e2m1,
    unpack_e2m1,
)
from dsv4.weights.native import is_disguised_mxfp4, unsupported_reason
from dsv4.weights.quant import QuantFormat, QuantTensor

# Columns of one E8M0 scale of DeepSeek's arithmetic, and the smallest amax that it is made from.
FP8_GROUP = 128
FP8_SMALLEST_AMAX = 1e-4
# The same for a row's global scale in NVFP4: keeps it a normal number.
NVFP4_SMALLEST_AMAX = 2.0**-100
# The largest value of a row is its global scale times this.
NVFP4_LARGEST = E2M1_MAX * E4M3_MAX
SCALES_OF_AN_ATOM = 4
_E4M3_NAN = 0x7F
_E8M0_NAN = 0xFF


class ActivationFormat(enum.Enum):
    """How quantised rows ``[T, K]`` are kept. K is padded with zeros to K', whole atoms of scales.

    ======== ========================= ======================================= ==============
    format   codes                     scales                                  global_scale
    ======== ========================= ======================================= ==============
    FP8      uint8 [T, K'], E4M3       uint8 [T, K'/32], E8M0, four equal ones none
                                       for 128 columns
    NVFP4    uint8 [T, K'/2], two E2M1 uint8 [T, K'/16], E4M3                  float32 [T]
    ======== ========================= ======================================= ==============
    """

    FP8 = "fp8"
    NVFP4 = "nvfp4"

    @property
    def group_size(self) -> int:
        """Columns of one stored scale."""
        return 32 if self is ActivationFormat.FP8 else 16

    @property
    def codes_per_byte(self) -> int:
        """1 or 2."""
        return 1 if self is ActivationFormat.FP8 else 2

    def padded_columns(self, columns: int) -> int:
        """K': the columns of whole scale atoms, 128 of FP8 and 64 of NVFP4."""
        return round_up(columns, SCALES_OF_AN_ATOM * self.group_size)


_TAKEN: Mapping[ActivationMode, Mapping[QuantFormat, ActivationFormat]] = {
    "bf16": {},
    "fp8": {
        QuantFormat.FP8_BLOCK128: ActivationFormat.FP8,
        QuantFormat.MXFP4: ActivationFormat.FP8,
    },
    "nvfp4": {
        QuantFormat.FP8_BLOCK128: ActivationFormat.FP8,
        QuantFormat.MXFP4: ActivationFormat.FP8,
        QuantFormat.NVFP4: ActivationFormat.NVFP4,
    },
}


def activation_format(mode: ActivationMode, weight_format: QuantFormat) -> ActivationFormat | None:
    """The format of the activations that a weight in ``weight_format`` multiplies in steps of more
    than ``MAX_DECODE_TOKENS`` tokens, None for 16 or 32 bit.
    """
    return _TAKEN[mode].get(weight_format)


def activations_of(mode: ActivationMode, weight: QuantTensor) -> ActivationFormat | None:
    """The same of a stored weight: NVFP4 that is MXFP4 in disguise counts as MXFP4 in mode "fp8",
    and what tensor cores cannot scale exactly, such as FP8 with float32 scales, takes None.
    """
    format = weight.format
    if mode == "fp8" and is_disguised_mxfp4(weight):
        format = QuantFormat.MXFP4
    taken = activation_format(mode, format)
    return taken if taken is None or unsupported_reason(weight, format) is None else None


@dataclass(frozen=True)
class QuantizedRows:
    """Rows ``[T, K]`` as codes and scales of ``format``, ``columns`` = K; the scales in plain
    order (``swizzle_block_scale`` gives that of the tensor cores).

    A value is code · scale, in NVFP4 · the global scale of its row.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: ActivationFormat
    columns: int

    def dequantize(self) -> Tensor:
        """float32 ``[T, K]``. FP8: exact. NVFP4: code · scale, exact, times the global scale,
        rounded once.
        """
        if self.global_scale is None:
            values = self.codes.view(torch.float8_e4m3fn).float()
            scales = e8m0_to_float(self.scales)
        else:
            values = unpack_e2m1(self.codes)
            scales = self.scales.view(torch.float8_e4m3fn).float()
        values = (values.unflatten(-1, (-1, self.format.group_size)) * scales[..., None]).flatten(1)
        if self.global_scale is not None:
            values = values * self.global_scale[:, None]
        return values[:, : self.columns]


def quantize_rows(
    x: Tensor, format: ActivationFormat, global_scale: float | None = None
) -> QuantizedRows:
    """Float rows x ``[T, K]`` in ``format``: ``quantize_fp8``, which has no ``global_scale``, or
    ``quantize_nvfp4``.
    """
    if format is ActivationFormat.FP8:
        return quantize_fp8(x)
    return quantize_nvfp4(x, global_scale)


def quantize_fp8(x: Tensor) -> QuantizedRows:
    """Float rows x ``[T, K]`` as DeepSeek's own code rounds them: of 128 columns

    scale = 2^⌈log2(max(amax, 1e-4) · (1 / 448))⌉, code = e4m3(x / scale), ties to even.

    All 128 codes and their scale are NaN where one of the values is NaN or infinite.
    """
    format = ActivationFormat.FP8
    groups_TGC = _finite_or_nan(x, format).unflatten(-1, (-1, FP8_GROUP))
    amax_TG = groups_TGC.abs().amax(-1).clamp(min=FP8_SMALLEST_AMAX)
    scales_TG = exponent_to_e8m0(ceil_power_of_two_exponent(amax_TG * (1 / E4M3_MAX)))
    scaled_TGC = groups_TGC / e8m0_to_float(scales_TG)[..., None]
    codes_TGC = scaled_TGC.to(torch.float8_e4m3fn).view(torch.uint8)
    lost_TG = amax_TG.isnan()
    codes_TGC = codes_TGC.masked_fill(lost_TG[..., None], _E4M3_NAN)
    scales_TG = scales_TG.view(torch.uint8).masked_fill(lost_TG, _E8M0_NAN)
    repeats = FP8_GROUP // format.group_size
    scales_TS = scales_TG.repeat_interleave(repeats, dim=-1)
    return QuantizedRows(codes_TGC.flatten(1), scales_TS, None, format, x.shape[1])


def quantize_nvfp4(x: Tensor, global_scale: float | None = None) -> QuantizedRows:
    """Float rows x ``[T, K]`` in E2M1: global = max(amax of the row, 2^-100) · (1 / 2688), or
    ``global_scale`` for every row, and of 16 columns

    scale = e4m3(min(amax · (1 / (6 · global)), 448)), code = e2m1(x · (1 / (scale · global))),

    every operation rounded to float32, codes ties to even. Groups whose scale is 0 have codes 0. So
    have those with NaN or an infinity; their scale is NaN, that of their row too where it is made
    from the row.
    """
    format = ActivationFormat.NVFP4
    values_TK = _finite_or_nan(x, format)
    if global_scale is None:
        amax_T = values_TK.abs().amax(-1).clamp(min=NVFP4_SMALLEST_AMAX)
        global_T = amax_T * (1 / NVFP4_LARGEST)
    else:
        global_T = torch.full((x.shape[0],), global_scale, dtype=torch.float32, device=x.device)
    groups_TGC = values_TK.unflatten(-1, (-1, format.group_size))
    per_global_T = 1 / (E2M1_MAX * global_T)
    exact_TG = (groups_TGC.abs().amax(-1) * per_global_T[:, None]).clamp(max=E4M3_MAX)
    lost_TG = exact_TG.isnan()
    codes_TG = exact_TG.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(lost_TG, _E4M3_NAN)
    scales_TG = codes_TG.view(torch.float8_e4m3fn).float()
    inverse_TG = 1 / (scales_TG * global_T[:, None])
    scaled_TGC = torch.where((scales_TG > 0)[..., None], groups_TGC * inverse_TG[..., None], 0.0)
    return QuantizedRows(pack_e2m1(scaled_TGC.flatten(1)), codes_TG, global_T, format, x.shape[1])


def hidden_global_scale(limit: float, largest_weight: float) -> float:
    """The global scale of every hidden row of an expert: the smallest power of two that is at least
    limit² · largest routing weight / 2688.

    |silu(gate) · up · weight| < limit² · weight, so no scale of a row saturates, and no row has to
    be seen whole before its first code is written.
    """
    mantissa, exponent = math.frexp(limit * limit * largest_weight / NVFP4_LARGEST)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def _finite_or_nan(x: Tensor, format: ActivationFormat) -> Tensor:
    """x in float32, padded to whole scale atoms; infinities as NaN, which no maximum hides."""
    values = torch.nn.functional.pad(x.float(), (0, format.padded_columns(x.shape[1]) - x.shape[1]))
    return torch.where(values.isinf(), torch.nan, values)
