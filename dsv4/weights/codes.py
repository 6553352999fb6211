"""Element codes E2M1 and scale codes E8M0, to and from float32 (model.md#codes-and-scales)."""

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours. A tie goes to the even code, so every second comparison includes
# equality.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """E8M0 bytes (``float8_e8m0fnu``) to float32 2^(b − 127); byte 255 is NaN. The bytes are
    viewed, never converted.
    """
    code = scale.view(torch.uint8).to(torch.int32)
    # Code 0 is 2^-127, a float32 subnormal, which the exponent field alone cannot express.
    bits = torch.where(code == 0, 1 << 22, code << 23)
    return torch.where(code == 255, torch.nan, bits.view(torch.float32))


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 ``[..., K/2]`` to float32 ``[..., K]``: element 2k in the low nibble, 2k + 1 in the
    high nibble.
    """
    table = torch.tensor(
        _E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES),
        dtype=torch.float32,
        device=packed.device,
    )
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return table[codes.to(torch.int32)]


def pack_e2m1(values: Tensor) -> Tensor:
    """Rounds float ``[..., K]`` (K even) to E2M1, ties to even, saturating at ±6, into uint8
    ``[..., K/2]``.
    """
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        code += (magnitude >= midpoint) if index % 2 else (magnitude > midpoint)
    code |= torch.signbit(values).to(torch.uint8) << 3
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def ceil_power_of_two_exponent(values: Tensor) -> Tensor:
    """int32 exponent e of the smallest power of two 2^e ≥ value, from the float32 bits (positive
    normal values).
    """
    bits = values.float().view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def exponent_to_e8m0(exponent: Tensor) -> Tensor:
    """int32 exponents to E8M0 bytes, clamped to the representable [−127, 127]."""
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
