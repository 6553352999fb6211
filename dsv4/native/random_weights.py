"""Random weights for checks, made on the device they are for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.weights.quant import FP8_BLOCK, QuantFormat, QuantTensor

# No NaN among E4M3 codes: their magnitude bits are never all ones.
_E4M3_MASK = 0xF7
# Exponents of E8M0 scales: 2^-10 to 2^-6, and for FP8, whose codes reach 448, 2^-16 to 2^-12.
_MXFP4_EXPONENTS = (117, 122)
_FP8_EXPONENTS = (111, 116)
# E4M3 scales of 0.25 to 1.875, and those of them that are powers of two.
_NVFP4_SCALES = (0x28, 0x40)
_NVFP4_POWERS = (0x28, 0x30, 0x38)


@dataclass
class RandomWeights:
    """Weights and rows from one generator, so that the same calls give the same values."""

    device: torch.device
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def rows(self, *shape: int) -> Tensor:
        """bfloat16 values of standard deviation 1."""
        values = torch.randn(
            shape, generator=self._generator, dtype=torch.float32, device=self.device
        )
        return values.to(torch.bfloat16)

    def weight(self, format: QuantFormat, *shape: int, disguised: bool = False) -> QuantTensor:
        """Random codes and scales of a weight ``[..., N, K]``. ``disguised``: NVFP4 scales that are
        powers of two in equal pairs. FP8 scales are powers of two.
        """
        *stack, rows, columns = shape
        if format is QuantFormat.BF16:
            return QuantTensor.dense(self.rows(*shape) * columns**-0.5)
        if format is QuantFormat.FP8_BLOCK128:
            data = (self._bytes(0, 256, *shape) & _E4M3_MASK).view(torch.float8_e4m3fn)
            blocks = (*stack, ceil_div(rows, FP8_BLOCK), ceil_div(columns, FP8_BLOCK))
            scale = self._bytes(*_FP8_EXPONENTS, *blocks).view(torch.float8_e8m0fnu)
            return QuantTensor(data, scale, None, format, shape)
        data = self._bytes(0, 256, *stack, rows, columns // 2)
        assert format.group_size is not None
        scale_shape = (*stack, rows, columns // format.group_size)
        if format is QuantFormat.MXFP4:
            scale = self._bytes(*_MXFP4_EXPONENTS, *scale_shape).view(torch.float8_e8m0fnu)
            return QuantTensor(data, scale, None, format, shape)
        if disguised:
            powers = torch.tensor(_NVFP4_POWERS, dtype=torch.uint8, device=self.device)
            pairs = (*stack, rows, columns // (2 * format.group_size))
            codes = powers[self._bytes(0, len(_NVFP4_POWERS), *pairs).int()]
            scale = codes.repeat_interleave(2, dim=-1)
        else:
            scale = self._bytes(*_NVFP4_SCALES, *scale_shape)
        total = torch.full(tuple(stack), 0.01, dtype=torch.float32, device=self.device)
        return QuantTensor(data, scale.view(torch.float8_e4m3fn), total, format, shape)

    def _bytes(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high, shape, generator=self._generator, dtype=torch.uint8, device=self.device
        )
