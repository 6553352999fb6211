"""Router on the GPU: logits by a matrix product, ids and weights by a selection kernel."""

import torch
from torch import Tensor

from dsv4.launch.loader import Defines, Given, launch
from dsv4.ops.linear.prefill import prefill_linear
from dsv4.ops.router import Router
from dsv4.quant import QuantFormat
from dsv4.weights.packed import PackedWeight

MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN = 640, 16
_WARPS = 8


def route(x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight]) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.router.route`` for bfloat16 x and a packed BF16 gate: ids int64, weights float32 ``[T, P]``.

    float32 logits; ties go to the lowest expert and NaN scores come first, as in torch's stable descending sort. A
    token id outside a hash router's table reads its first or last row. Raises ``ValueError`` as ``check_router``.
    """
    check_router(x_TE, tokens_T, router)
    tokens, gate, per_token, device = x_TE.shape[0], router.gate, router.experts_per_token, x_TE.device
    ids_TP = torch.empty((tokens, per_token), dtype=torch.int64, device=device)
    weights_TP = torch.empty((tokens, per_token), dtype=torch.float32, device=device)
    if tokens == 0:
        return ids_TP, weights_TP
    vocabulary = router.selection.shape[0] if router.hashed else 0
    logits_TX = prefill_linear(x_TE, gate, torch.float32).contiguous()
    launch(
        *("router", "router_select", -(-tokens // _WARPS), _WARPS * 32, logits_TX),
        *(*selection_arguments(router, tokens_T.contiguous()), ids_TP, weights_TP),
        *(tokens, gate.shape[0], per_token, vocabulary, float(router.scaling)),
        device=device,
        defines=selection_defines(router),
    )
    return ids_TP, weights_TP


def selection_defines(router: Router[PackedWeight]) -> Defines:
    """What router.cuh is compiled with."""
    return (("PER_LANE", -(-router.gate.shape[0] // 32)), ("HASH", int(router.hashed)))


def selection_arguments(
    router: Router[PackedWeight], tokens_T: Given
) -> tuple[Tensor | None, Tensor | None, Given | None]:
    """Bias, table and token ids, of which a kernel reads the first or the others."""
    selection = router.selection.contiguous()
    return (None, selection, tokens_T) if router.hashed else (selection, None, None)


def check_router(x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight]) -> None:
    """Raises ``ValueError`` for operands whose dtype, shape or device the kernels do not read."""
    gate, device = router.gate, x_TE.device
    if x_TE.dtype != torch.bfloat16 or x_TE.dim() != 2:
        raise ValueError(f"x_TE: found {x_TE.dtype} {list(x_TE.shape)}, expected torch.bfloat16 [T, E]")
    if not isinstance(gate, PackedWeight) or gate.format is not QuantFormat.BF16:
        raise ValueError(f"gate: found {gate.format.value}, expected a packed bf16 weight")
    if len(gate.shape) != 2 or gate.shape[1] != x_TE.shape[1] or gate.shape[0] > MAX_EXPERTS or gate.device != device:
        expected = f"[X ≤ {MAX_EXPERTS}, {x_TE.shape[1]}] on {device}"
        raise ValueError(f"gate: found {list(gate.shape)} on {gate.device}, expected {expected}")
    most = min(gate.shape[0], MAX_EXPERTS_PER_TOKEN)
    if not 1 <= router.experts_per_token <= most:
        raise ValueError(f"experts_per_token: found {router.experts_per_token}, expected 1 to {most}")
    if router.hashed:
        shape = (router.selection.shape[0], router.experts_per_token)
        _check("selection", router.selection, torch.int64, shape, device)
        _check("tokens_T", tokens_T, torch.int64, (x_TE.shape[0],), device)
    else:
        _check("selection", router.selection, torch.float32, (gate.shape[0],), device)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device:
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name}: found {found}, expected {dtype} {list(shape)} on {device}")
