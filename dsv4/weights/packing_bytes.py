"""Extra bytes of packing a weight, at the moment when most is alive."""

import torch

from dsv4.weights.native import native_bytes, unsupported_reason
from dsv4.weights.packed import matrices_at_once, padded
from dsv4.weights.packed_native import native_format
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import QuantFormat, packed_bytes, planned_quant_tensor

# Copies of the matrices that are packed together, in their own bytes, that are alive while their
# 4-bit codes are put in another order, and the tables of codes; float32 copies, the result
# included, while the torch ops dequantize a quantised one.
_CODE_COPIES = 5
_TABLE_BYTES = 5 << 19
_DEQUANTIZING_COPIES = 4


def is_packed(parameter: Parameter) -> bool:
    """Whether the op table packs it: rows of the embedding and of ``markov_w1`` are looked up as
    stored.
    """
    is_matrix = parameter.role in (Role.LINEAR, Role.EXPERT, Role.FLOOR)
    return is_matrix and not parameter.name.endswith(("embed.weight", "markov_w1.weight"))


def dequantized_bytes(parameter: Parameter) -> int:
    """Bytes of the float32 copy that the torch ops make of a matrix."""
    return 4 * torch.Size(parameter.shape).numel() if is_packed(parameter) else 0


def native_copy_bytes(parameter: Parameter, format: QuantFormat | None, nvfp4: bool) -> int:
    """Bytes of the native copy of a stored parameter, 0 where its shape and format allow none.

    What depends on values counts as allowed. ``nvfp4`` as in ``native_format``.
    """
    if format is None or not is_packed(parameter):
        return 0
    target = native_format(format, nvfp4)
    if unsupported_reason(planned_quant_tensor(format, parameter.shape), target) is not None:
        return 0
    return native_bytes(target, parameter.shape)


def packing_bytes(parameter: Parameter, format: QuantFormat | None, nbytes: int) -> int:
    """Extra bytes of packing a stored parameter of ``nbytes`` for the CUDA ops."""
    if format is None or not is_packed(parameter):
        return 0
    # A stack is allocated whole, with rows and columns to whole tiles (F32 is rounded first), and
    # filled some matrices at a time; only then the stored one goes.
    is_rounded = format is QuantFormat.F32
    packed_format = QuantFormat.BF16 if is_rounded else format
    *stacked, rows, columns = parameter.shape
    tiled = (*stacked, padded(rows), padded(columns))
    padding = packed_bytes(packed_format, tiled) - packed_bytes(packed_format, parameter.shape)
    stack = (2 * nbytes if is_rounded else nbytes) + padding
    matrices = parameter.shape[0] if parameter.role is Role.EXPERT else 1
    stored, packed = (
        planned_quant_tensor(packed_format, shape).data.nbytes // matrices
        for shape in (parameter.shape, tiled)
    )
    together = packed * min(matrices, matrices_at_once(stored))
    if format.group_size is None:
        # Of values one in the other order, and one with the padding.
        return stack + (2 if padding else 1) * together
    return stack + _CODE_COPIES * together + _TABLE_BYTES


def packing_with_native_bytes(parameter: Parameter, format: QuantFormat | None, nbytes: int) -> int:
    """The same beside native copies: w1, w2 and w3 of experts live as stored until all have one."""
    together = 2 * nbytes if parameter.role is Role.EXPERT else 0
    return packing_bytes(parameter, format, nbytes) + together


def dequantizing_bytes(parameter: Parameter, format: QuantFormat | None) -> int:
    """Bytes of dequantizing a stored parameter for the torch ops, without it and the result."""
    dense = format in (QuantFormat.BF16, QuantFormat.F32)
    if format is None or dense or not is_packed(parameter):
        return 0
    return (_DEQUANTIZING_COPIES - 1) * 4 * torch.Size(parameter.shape).numel()
