"""Quantised activations in the torch ops: a weight knows which ones it multiplies, and they are
rounded to what the codes mean before a product in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.quantize_activations import ActivationFormat, activations_of, quantize_rows
from dsv4.weights.quant import QuantTensor, Weight


@dataclass(frozen=True)
class EmulatedWeight:
    """The ``values`` ``[..., N, K]`` of a weight that multiplies ``activations``: those of a stored
    one in float32, or a packed one.
    """

    values: Weight
    activations: ActivationFormat

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    def __getitem__(self, index: int) -> "EmulatedWeight":
        """One matrix of a stack."""
        return EmulatedWeight(self.values[index], self.activations)

    def dequantize(self) -> Tensor:
        """The values in float32."""
        return self.values.dequantize()


def dequantized_weight(
    weight: QuantTensor, mode: ActivationMode = "bf16"
) -> QuantTensor | EmulatedWeight:
    """The torch ops' weight layout: the same values dequantized once to float32, so that no
    step pays for it, with the activations that the weight takes in ``mode``.
    """
    values = QuantTensor.dense(weight.dequantize())
    activations = activations_of(mode, weight)
    return values if activations is None else EmulatedWeight(values, activations)


def multiplied(x: Tensor, weight: Weight, tokens: int, global_scale: float | None = None) -> Tensor:
    """What ``weight`` multiplies in a step of ``tokens`` tokens, float32 in the shape of x: x
    ``[T, K]`` or ``[T, G, K]``, in steps of more than ``MAX_DECODE_TOKENS`` rounded to the
    activations of an ``EmulatedWeight``.

    The groups of a token are one row, each padded to whole scale atoms. ``global_scale``: of
    hidden rows in NVFP4.
    """
    if not isinstance(weight, EmulatedWeight) or tokens <= MAX_DECODE_TOKENS:
        return x.float()
    format = weight.activations
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, format.padded_columns(columns) - columns))
    rows = quantize_rows(padded.flatten(1), format, global_scale)
    return rows.dequantize().view(padded.shape)[..., :columns]
