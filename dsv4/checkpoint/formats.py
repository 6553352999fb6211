"""The tensors of every storage format and the dtypes they may have.

============ =========================== ================= ======================================
format       data                        block scale       further tensors
============ =========================== ================= ======================================
BF16, F32    ``weight``
FP8          ``weight`` F8_E4M3          ``scale``
MXFP4        ``weight`` I8               ``scale``
NVFP4        ``weight`` U8               ``weight_scale``  ``weight_scale_2``, maybe ``input_scale``
============ =========================== ================= ======================================
"""

import torch

from dsv4.checkpoint.declarations import DENSE
from dsv4.weights.parameters import Role
from dsv4.weights.quant import FP8_BLOCK, QuantFormat

COMPONENTS = {
    QuantFormat.BF16: {"data": "weight"},
    QuantFormat.F32: {"data": "weight"},
    QuantFormat.FP8_BLOCK128: {"data": "weight", "block_scale": "scale"},
    QuantFormat.MXFP4: {"data": "weight", "block_scale": "scale"},
    QuantFormat.NVFP4: {
        "data": "weight",
        "block_scale": "weight_scale",
        "global_scale": "weight_scale_2",
    },
}
ALL_COMPONENTS = (
    "weight",
    "scale",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "weight_packed",
)
# E8M0 and packed E2M1 are bytes whatever they are called: some writers know no E8M0, some have only
# signed bytes.
_BYTES = (torch.int8, torch.uint8)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
MATRIX_DTYPES = {
    (QuantFormat.BF16, "data"): (torch.bfloat16,),
    (QuantFormat.F32, "data"): (torch.float32,),
    (QuantFormat.FP8_BLOCK128, "data"): (torch.float8_e4m3fn,),
    (QuantFormat.FP8_BLOCK128, "block_scale"): (*_E8M0, torch.float32),
    (QuantFormat.MXFP4, "data"): _BYTES,
    (QuantFormat.MXFP4, "block_scale"): _E8M0,
    (QuantFormat.NVFP4, "data"): _BYTES,
    (QuantFormat.NVFP4, "block_scale"): (torch.float8_e4m3fn,),
    (QuantFormat.NVFP4, "global_scale"): (torch.float32,),
    (QuantFormat.NVFP4, "input_scale"): (torch.float32,),
}
PLAIN_DTYPES = {
    Role.NORM: (torch.bfloat16, torch.float32),
    Role.FLOAT: (torch.float32, torch.bfloat16),
    Role.TABLE: (torch.int64, torch.int32),
}


def format_shown_by(present: set[str], dtype: torch.dtype | None) -> tuple[str, QuantFormat] | None:
    """The format that an undeclared set of components shows: in words, and to go on checking with.

    None when the components are only incomplete.
    """
    if "weight_packed" in present:
        return (
            "compressed-tensors, which is not supported: its global scales are divisors",
            QuantFormat.NVFP4,
        )
    if present - {"input_scale"} == set(COMPONENTS[QuantFormat.NVFP4].values()):
        return "nvfp4", QuantFormat.NVFP4
    if present == {"weight", "scale"}:
        return "mxfp4 or fp8", QuantFormat.MXFP4 if dtype in _BYTES else QuantFormat.FP8_BLOCK128
    dense = {torch.bfloat16: QuantFormat.BF16, torch.float32: QuantFormat.F32}
    return ("unquantised", dense[dtype]) if present == {"weight"} and dtype in dense else None


def can_be_halved(format: QuantFormat, shape: tuple[int, ...]) -> bool:
    """Whether gate and up rows of a fused tensor can be told apart in data and scales."""
    return (
        format in DENSE
        or format is QuantFormat.MXFP4
        or (format is QuantFormat.FP8_BLOCK128 and shape[-2] % FP8_BLOCK == 0)
    )
