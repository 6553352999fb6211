"""Extra bytes of packing a weight, at the moment when most is alive."""

import torch

from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import QuantFormat

# Copies of a matrix, in its own bytes, that are alive while its 4-bit codes or its values are put
# in another order; and float32 copies, the result included, while the torch ops dequantize a
# quantised one.
_CODE_COPIES = 8
_VALUE_COPIES = 2
_DEQUANTIZING_COPIES = 4


def is_packed(parameter: Parameter) -> bool:
    """Whether the op table packs it: the embedding is looked up, and the speculative module kept,
    as stored.
    """
    is_matrix = parameter.role in (Role.LINEAR, Role.EXPERT, Role.FLOOR)
    return is_matrix and not parameter.name.startswith(("embed.", "mtp."))


def dequantized_bytes(parameter: Parameter) -> int:
    """Bytes of the float32 copy that the torch ops make of a matrix."""
    return 4 * torch.Size(parameter.shape).numel() if is_packed(parameter) else 0


def packing_bytes(parameter: Parameter, format: QuantFormat | None, nbytes: int) -> int:
    """Extra bytes of packing a stored parameter of ``nbytes`` for the CUDA ops."""
    if format is None or not is_packed(parameter):
        return 0
    # A stack is allocated whole (F32 is rounded first) and filled matrix by matrix; only then the
    # stored one goes.
    stack = 2 * nbytes if format is QuantFormat.F32 else nbytes
    matrices = parameter.shape[0] if parameter.role is Role.EXPERT else 1
    copies = _VALUE_COPIES if format.group_size is None else _CODE_COPIES
    return stack + copies * (nbytes // matrices)


def dequantizing_bytes(parameter: Parameter, format: QuantFormat | None) -> int:
    """Bytes of dequantizing a stored parameter for the torch ops, without it and the result."""
    dense = format in (QuantFormat.BF16, QuantFormat.F32)
    if format is None or dense or not is_packed(parameter):
        return 0
    return (_DEQUANTIZING_COPIES - 1) * 4 * torch.Size(parameter.shape).numel()
