"""Changes the format of matrices: exactly where that is possible, else by quantising
(model.md#nvfp4).
"""

import torch

from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import nvfp4_global_scale, quantize

# E4M3 holds the powers of two 2^-9 .. 2^8.
_E4M3_MAX_EXPONENT = 8
_E4M3_EXPONENT_SPAN = 17


def convert(weights: list[QuantTensor], format: QuantFormat) -> list[QuantTensor]:
    """Matrices ``[N, K]`` in ``format``; in NVFP4 they share one global scale (w1 and w3 of an
    expert must).

    A matrix that is in ``format`` already is returned as it is. MXFP4 to NVFP4 keeps every value
    whenever E4M3 can hold the block scales. Raises ``ValueError`` for NaN or infinity.
    """
    if all(weight.format is format for weight in weights):
        return weights
    if format is not QuantFormat.NVFP4:
        return [
            weight if weight.format is format else quantize(weight.dequantize(), format)
            for weight in weights
        ]
    return _cast_mxfp4(weights) or _quantize_together([weight.dequantize() for weight in weights])


def _quantize_together(values: list[torch.Tensor]) -> list[QuantTensor]:
    # An all-zero matrix has the neutral scale 1, which must not decide for the others.
    scales = [nvfp4_global_scale(value) for value in values if bool(value.any())]
    shared = (
        torch.stack(scales).amax()
        if scales
        else torch.tensor(1.0, dtype=torch.float32, device=values[0].device)
    )
    return [quantize(value, QuantFormat.NVFP4, shared) for value in values]


def _cast_mxfp4(weights: list[QuantTensor]) -> list[QuantTensor] | None:
    """The same codes with block scale 2^(k − kmax + 8) and global scale 2^(kmax − 8), or None if
    that is not exact.

    Every 32-group becomes two 16-groups of equal scale. A group of zeros may have any scale, so it
    limits nothing.
    """
    if any(weight.format is not QuantFormat.MXFP4 for weight in weights):
        return None
    exponents = []
    used = []
    for weight in weights:
        assert weight.block_scale is not None
        code = weight.block_scale.view(torch.uint8).to(torch.int32)
        if bool((code == 255).any()):
            return None
        exponents.append(code - 127)
        used.append(((weight.data & 0x77) != 0).unflatten(-1, (-1, 16)).any(-1))
    in_use = torch.cat([exponent[mask] for exponent, mask in zip(exponents, used, strict=True)])
    highest = int(in_use.max()) if in_use.numel() else 0
    lowest = highest - _E4M3_EXPONENT_SPAN
    if in_use.numel() and int(in_use.min()) < lowest:
        return None
    global_scale = torch.tensor(
        2.0 ** (highest - _E4M3_MAX_EXPONENT), dtype=torch.float32, device=weights[0].device
    )
    casts = []
    for weight, exponent in zip(weights, exponents, strict=True):
        shifted = exponent.clamp(lowest, highest) - highest + _E4M3_MAX_EXPONENT
        block_scale = (
            torch.exp2(shifted.float()).to(torch.float8_e4m3fn).repeat_interleave(2, dim=-1)
        )
        casts.append(
            QuantTensor(weight.data, block_scale, global_scale, QuantFormat.NVFP4, weight.shape)
        )
    return casts
