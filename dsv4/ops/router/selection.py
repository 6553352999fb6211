"""What both forms of the router share: checks of its operands, and what ``router.cuh`` reads."""

import torch
from torch import Tensor

from dsv4.launch.checks import expect
from dsv4.launch.constants import MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN
from dsv4.launch.kernel import Defines
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight
from dsv4.weights.quant import QuantFormat

WARP = 32


def selection_defines(router: Router[PackedWeight]) -> Defines:
    """What router.cuh is compiled with."""
    return (
        ("EXPERTS", router.gate.shape[0]),
        ("EXPERTS_PER_TOKEN", router.experts_per_token),
        ("HASH", int(router.hashed)),
    )


def selection_arguments(
    router: Router[PackedWeight], tokens_T: Tensor
) -> dict[str, Tensor | int | float | None]:
    """Kernel arguments by name: bias, or table and token ids; V (0 without a table), scaling."""
    hashed = router.hashed
    return {
        "bias_X": None if hashed else router.selection,
        "table_VP": router.selection if hashed else None,
        "tokens_T": tokens_T if hashed else None,
        "V": router.selection.shape[0] if hashed else 0,
        "scaling": float(router.scaling),
    }


def check_router(x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight]) -> None:
    """Raises ``ValueError`` for operands whose dtype, shape or strides the kernels do not read.

    ``tokens_T`` matters only to a hash router. The rows of x may lie apart.
    """
    gate = router.gate
    if x_TE.dtype != torch.bfloat16 or x_TE.dim() != 2:
        found = f"{x_TE.dtype} {list(x_TE.shape)}"
        raise ValueError(f"x_TE: found {found}, expected torch.bfloat16 [T, E]")
    if not isinstance(gate, PackedWeight) or gate.format is not QuantFormat.BF16:
        raise ValueError(f"gate: found {gate.format.value}, expected a packed bf16 weight")
    width = x_TE.shape[1]
    if len(gate.shape) != 2 or gate.shape[1] != width or gate.shape[0] > MAX_EXPERTS:
        expected = f"[X ≤ {MAX_EXPERTS}, {width}]"
        raise ValueError(f"gate: found {list(gate.shape)}, expected {expected}")
    most = min(gate.shape[0], MAX_EXPERTS_PER_TOKEN)
    if not 1 <= router.experts_per_token <= most:
        found = router.experts_per_token
        raise ValueError(f"experts_per_token: found {found}, expected 1 to {most}")
    if router.hashed:
        table_shape = (router.selection.shape[0], router.experts_per_token)
        expect("selection", router.selection, torch.int64, table_shape)
        expect("tokens_T", tokens_T, torch.int64, (x_TE.shape[0],))
    else:
        expect("selection", router.selection, torch.float32, (gate.shape[0],))
