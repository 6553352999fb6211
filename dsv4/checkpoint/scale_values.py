"""What only the values of scales show: exponents taken for numbers, and what is no number."""

import math

import torch
from torch import Tensor

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.pieces import Piece
from dsv4.checkpoint.stored_parameters import Part, StoredParameter
from dsv4.errors import UserError
from dsv4.weights.codes import E4M3_MAX, e8m0_to_float
from dsv4.weights.quant import QuantTensor

# Scales of released weights are far below 1. A converter that took the E8M0 byte of one for a
# number writes 100 or more. Those of NVFP4 share a global scale and may be any number; times it
# they are such scales, and 10^5 or more where it is a divisor, as compressed-tensors writes it.
_LARGEST_SCALE = 64.0
# The byte of the largest scale: larger bytes are larger scales or NaN, in E4M3 also negative ones.
_LARGEST_BYTE = {torch.float8_e8m0fnu: 127 + 6, torch.float8_e4m3fn: 0x7E}


def check_scales(
    checkpoint: Checkpoint, stored: StoredParameter, weight: QuantTensor, first_expert: int = 0
) -> None:
    """Raises ``UserError`` for the first global scale that is no finite number above 0 or so large
    that it was a divisor, or block scale that is no number from 0, or so large that it was an
    exponent.
    """
    if weight.global_scale is not None:
        values = weight.global_scale.reshape(-1).tolist()
        for expert, value in enumerate(values, first_expert):
            if not 0.0 < value < math.inf:
                name = _name(stored.parts["global_scale"], expert)
                raise UserError(
                    f"{checkpoint.folder}: {name}: found {value}, expected a finite number above 0"
                )
    if weight.block_scale is None:
        return
    scales = weight.block_scale.view(math.prod(weight.shape[:-2]), -1)
    for expert, is_wrong in enumerate(_has_wrong(scales, weight.global_scale), first_expert):
        if not is_wrong:
            continue
        name = _name(stored.parts["block_scale"], expert)
        # Of the file: a rank may hold a part, whose places are others.
        scale = checkpoint.read(name).view(weight.block_scale.dtype)
        wrong = _first_wrong(scale)
        if wrong is None and weight.global_scale is not None:
            name = _name(stored.parts["global_scale"], expert)
            total = float(weight.global_scale.reshape(-1)[expert - first_expert])
            wrong = _too_large(total, scale)
        raise UserError(f"{checkpoint.folder}: {name}: {wrong or 'changed while it was read'}")


def _name(part: Part, expert: int) -> str:
    """The tensor of the expert, or the one of all."""
    return part.names[0] if part.fused else part.names[expert]


def check_converted(weight: QuantTensor) -> None:
    """Raises ``ValueError`` for a matrix that was quantised with a scale that loading refuses."""
    scale = weight.block_scale
    if scale is not None and _has_wrong(scale.view(1, -1), weight.global_scale)[0]:
        largest = float(weight.dequantize().abs().max())
        format = weight.format.value
        raise ValueError(f"found weights up to {largest:g}, too large for the scales of {format}")


def _has_wrong(scale_NB: Tensor, total: Tensor | None) -> list[bool]:
    """Whether a row has a scale that is refused, also times its global scale, of which ``total``
    has at least one for every row. One pass over bytes that lie in memory anyway.
    """
    if scale_NB.dtype not in _LARGEST_BYTE:
        least, most = scale_NB.aminmax(dim=1)
        return ((least >= 0.0) & (most <= _LARGEST_SCALE)).logical_not().tolist()
    largest_N = scale_NB.view(torch.uint8).amax(1)
    wrong_N = largest_N > _LARGEST_BYTE[scale_NB.dtype]
    if total is not None:
        total_N = total.reshape(len(scale_NB), -1).amax(1)
        wrong_N |= largest_N.view(scale_NB.dtype).float() * total_N > _LARGEST_SCALE
    return wrong_N.tolist()


def _first_wrong(scale: Tensor) -> str | None:
    """What is said of the first scale that is refused by itself."""
    is_nvfp4 = scale.dtype == torch.float8_e4m3fn
    values = e8m0_to_float(scale) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    most = E4M3_MAX if is_nvfp4 else _LARGEST_SCALE
    places = (~(values <= most) | values.signbit()).nonzero()
    if not len(places):
        return None
    place = places[0].tolist()
    found = float(values[tuple(place)])
    # No byte that was taken for a number is negative, NaN or infinite.
    was_byte = not is_nvfp4 and most < found < math.inf
    hint = ": E8M0 bytes are exponents, not numbers" if was_byte else ""
    return f"found {found:g} at {place}, expected 0 to {most:g}{hint}"


def _too_large(total: float, scale: Tensor) -> str:
    """What is said of a global scale that makes too large scales of those of its blocks."""
    found = f"found {total:g} with block scales up to {float(scale.float().max()):g}"
    return (
        f"{found}, expected a product of at most {_LARGEST_SCALE:g}: global scales are factors, "
        "not divisors"
    )


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
