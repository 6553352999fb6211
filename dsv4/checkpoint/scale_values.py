"""What only the values of scales show: exponents taken for numbers, and what is no number."""

import math

import torch
from torch import Tensor

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.pieces import Piece
from dsv4.checkpoint.stored_parameters import StoredParameter
from dsv4.errors import UserError
from dsv4.weights.quant import QuantFormat, QuantTensor

# Scales of released weights are far below 1. A converter that took the E8M0 byte of one for a
# number writes 100 or more.
_LARGEST_BLOCK_SCALE = 64.0


def check_scales(
    checkpoint: Checkpoint, stored: StoredParameter, weight: QuantTensor, first_expert: int = 0
) -> None:
    """Raises ``UserError`` for the first scale that is no finite number above 0, or so large that
    it was an exponent.
    """
    if weight.global_scale is not None:
        names = stored.parts["global_scale"].names[first_expert:]
        for name, value in zip(names, weight.global_scale.reshape(-1).tolist(), strict=False):
            if not 0.0 < value < math.inf:
                raise UserError(
                    f"{checkpoint.folder}: {name}: found {value}, expected a finite number above 0"
                )
    if weight.block_scale is None or weight.format is QuantFormat.NVFP4:
        return
    part = stored.parts["block_scale"]
    names = part.names if part.fused else part.names[first_expert:]
    groups = weight.block_scale.view(1 if part.fused else math.prod(weight.shape[:-2]), -1)
    for name, (least, most) in zip(names, _extremes(groups), strict=False):
        if not (least >= 0.0 and most <= _LARGEST_BLOCK_SCALE):
            found = least if least < 0.0 else most
            expected = f"0 to {_LARGEST_BLOCK_SCALE:g}: E8M0 bytes are exponents, not numbers"
            raise UserError(f"{checkpoint.folder}: {name}: found {found:g}, expected {expected}")


def _extremes(scale_NB: Tensor) -> list[tuple[float, float]]:
    """The least and the largest scale of every row; NaN where there is one."""
    if scale_NB.dtype != torch.float8_e8m0fnu:
        least, most = scale_NB.aminmax(dim=1)
        return list(zip(least.tolist(), most.tolist(), strict=True))
    codes = scale_NB.view(torch.uint8).amax(1).tolist()
    return [(0.0, math.nan if code == 255 else 2.0 ** (code - 127)) for code in codes]


def unfilled_input_scales(
    checkpoint: Checkpoint, stored: StoredParameter, device: torch.device
) -> tuple[Tensor, list[Piece]]:
    """Memory on ``device`` for the activation scales of a parameter, float32 ``[matrices]``, none
    where it has none, and the pieces that fill it: with the weight, between whose bytes they lie.
    """
    names = stored.parts["input_scale"].names if "input_scale" in stored.parts else ()
    values = torch.empty(len(names), dtype=torch.float32, device=device)
    targets = values.view(torch.uint8).view(len(names), values.itemsize).unbind()
    tensors = [checkpoint.tensors[name] for name in names]
    pieces = [
        Piece.whole(tensor.file, tensor.offset, target, stored.parameter.name)
        for tensor, target in zip(tensors, targets, strict=True)
    ]
    return values, pieces


def check_input_scales(checkpoint: Checkpoint, stored: StoredParameter, values: Tensor) -> None:
    """Raises ``UserError`` for the first of a parameter's activation scales, which nothing here
    uses but exports pass on, that is no finite number from 0.
    """
    if not len(values):
        return
    names = stored.parts["input_scale"].names
    for name, value in zip(names, values.tolist(), strict=True):
        if not 0.0 <= value < math.inf:
            raise UserError(
                f"{checkpoint.folder}: {name}: found {value}, expected a finite number from 0"
            )
