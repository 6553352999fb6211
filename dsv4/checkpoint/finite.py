"""Elements of matrices that are no numbers: 4-bit codes have none, BF16, F32 and E4M3 do."""

import torch
from torch import Tensor

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.stored_parameters import StoredParameter
from dsv4.errors import UserError
from dsv4.weights.quant import QuantTensor


def check_finite(
    checkpoint: Checkpoint, stored: StoredParameter, weight: QuantTensor, first_expert: int = 0
) -> None:
    """Raises ``UserError`` for the first element of ``weight`` that is NaN or infinite: kernels may
    read a NaN code of E4M3 as a number. One or two passes over bytes that lie in memory anyway.
    """
    if is_finite(weight.data):
        return
    part = stored.parts["data"]
    names = part.names if part.fused else part.names[first_expert:]
    for name in names:
        # Of the file: a rank may hold a part, whose places are others.
        tensor = checkpoint.read(name)
        if not is_finite(tensor):
            place = (~tensor.float().isfinite()).nonzero()[0].tolist()
            found = float(tensor[tuple(place)])
            raise UserError(
                f"{checkpoint.folder}: {name}: found {found:g} at {place}, expected finite numbers"
            )
    raise UserError(f"{checkpoint.folder}: {names[0]}: changed while it was read")


def is_finite(data: Tensor) -> bool:
    """Whether no element is NaN or infinite; by the extremes, without memory for each."""
    if not data.is_floating_point():
        return True
    if data.dtype == torch.float8_e4m3fn:
        # NaN is 7F and FF, the largest of bytes with and of bytes without a sign.
        positive = data.view(torch.int8).amax() == 0x7F
        return not bool(positive | (data.view(torch.uint8).amax() == 0xFF))
    least, most = data.aminmax()
    return bool(least.isfinite() & most.isfinite())
