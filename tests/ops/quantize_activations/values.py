"""Rows that quantisers have to get right, and the bytes they mean, one value at a time."""

import bisect
import math

import torch
from torch import Tensor

from dsv4.ops.quantize_activations import ActivationFormat, QuantizedRows, quantize_rows
from dsv4.weights.scale_swizzle import swizzle_block_scale

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    code / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
    for code in range(127)
]


def nearest_code(magnitude: float, values: list[float]) -> int:
    """The code of the nearest of ``values``, the even one of two; the last one beyond all."""
    above = bisect.bisect_left(values, magnitude)
    if above == len(values):
        return above - 1
    if above == 0:
        return 0
    below_by = magnitude - values[above - 1]
    above_by = values[above] - magnitude
    if below_by == above_by:
        return above - above % 2
    return above if above_by < below_by else above - 1


def single(value: float) -> float:
    """Rounded to float32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


def fp8_bytes(group: list[float]) -> tuple[list[int], int]:
    """Codes and E8M0 scale of 128 finite float32 values."""
    amax = max(single(1e-4), *map(abs, group))
    scaled = single(amax * single(1 / 448))
    mantissa, exponent = math.frexp(scaled)
    exponent -= mantissa == 0.5
    codes = [
        nearest_code(math.ldexp(abs(value), -exponent), E4M3) | (math.copysign(1, value) < 0) << 7
        for value in group
    ]
    return codes, exponent + 127


def nvfp4_bytes(group: list[float], total: float) -> tuple[list[int], int]:
    """Codes, one per value, and E4M3 scale of 16 finite float32 values of a row with the global
    scale ``total``.
    """
    per_total = single(1 / single(6 * total))
    code = nearest_code(single(max(map(abs, group)) * per_total), E4M3)
    if code == 0:
        return [0] * len(group), 0
    inverse = single(1 / single(E4M3[code] * total))
    codes = [
        nearest_code(single(abs(value) * inverse), E2M1) | (math.copysign(1, value) < 0) << 3
        for value in group
    ]
    return codes, code


def all_bfloat16() -> Tensor:
    """bfloat16 ``[65536]``: every bit pattern, finite or not, in their order."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def rows_of_all_values(group: int) -> Tensor:
    """bfloat16 ``[R, 128]`` in which every bit pattern comes in every place of a group of ``group``
    columns, beside values of its size and, in every place of the larger one, beside up to 2^27
    times as large ones.
    """
    values = all_bfloat16()
    rolled = [values.roll(offset).view(-1, 128) for offset in range(group)]
    smaller = torch.nn.functional.pad(values.view(torch.int16), (0, -len(values) % (group - 1)))
    smaller = smaller.view(torch.bfloat16).view(-1, group - 1)
    finite = smaller.where(smaller.isfinite(), 0).float()
    beside = []
    for exponent in range(28):
        larger = (finite.abs().amax(1, keepdim=True) * 2.0**exponent).clamp(max=3e38).bfloat16()
        place = exponent * 5 % group
        beside.append(torch.cat((smaller[:, :place], larger, smaller[:, place:]), dim=1))
    rows = torch.cat(beside).flatten()
    return torch.cat((*rolled, torch.nn.functional.pad(rows, (0, -len(rows) % 128)).view(-1, 128)))


def swizzled(rows: QuantizedRows) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and global scales as kernels write them: zeros up to 128 rows, scales in the
    order of the tensor cores.
    """
    missing = -rows.codes.shape[0] % 128
    total = rows.global_scale
    return (
        torch.nn.functional.pad(rows.codes, (0, 0, 0, missing)),
        swizzle_block_scale(rows.scales),
        None if total is None else torch.nn.functional.pad(total, (0, missing)),
    )


def rows_of_tiles(
    x: Tensor, tokens: Tensor, tiles: Tensor, format: ActivationFormat
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``swizzled`` rows of the experts: those of x ``[T, K]`` that int ``tokens`` ``[pairs]`` and
    the ``tiles`` ``[n, 4]`` in use name, tile i from row 128 · i on, zeros behind its last pair.
    """
    rows = torch.zeros(len(tiles) * 128, x.shape[1], dtype=x.dtype)
    is_zero = torch.ones(len(rows), dtype=torch.bool)
    for index, (_, first, pairs, _) in enumerate(tiles.tolist()):
        at = slice(index * 128, index * 128 + pairs)
        rows[at] = x[tokens[first : first + pairs].long()]
        is_zero[at] = False
    found = quantize_rows(rows, format)
    for part in (found.codes, found.scales, found.global_scale):
        if part is not None:
            part[is_zero] = 0
    return swizzled(found)
