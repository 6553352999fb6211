"""Router on the GPU: one launch for a decode step, a matrix product and a selection kernel for longer ones."""

import torch
from torch import Tensor

from dsv4.kernels.cuda.loader import launch, multiprocessors, zeroed_counters
from dsv4.ops.cuda.packed import PackedWeight
from dsv4.ops.cuda.prefill_linear import prefill_linear
from dsv4.quant import QuantFormat

MAX_DECODE_TOKENS = 8
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN = 640, 32
_WARPS, _MAX_PARTS = 8, 8


def route_learned(
    x_TE: Tensor, gate: PackedWeight, bias_X: Tensor, experts_per_token: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.router.route_learned`` for bfloat16 x and a packed BF16 gate: ids int64, weights float32 ``[T, P]``.

    float32 logits; ties go to the lowest expert and NaN scores come first, as in torch's stable descending sort.
    Raises ``ValueError`` for other dtypes, shapes or devices.
    """
    _check(x_TE, gate, experts_per_token)
    experts = gate.shape[0]
    if bias_X.dtype != torch.float32 or bias_X.shape != (experts,) or bias_X.device != x_TE.device:
        found = f"{bias_X.dtype} {list(bias_X.shape)} on {bias_X.device}"
        raise ValueError(f"bias_X: found {found}, expected torch.float32 [{experts}] on {x_TE.device}")
    return _route(x_TE, gate, bias_X.contiguous(), None, None, experts_per_token, scaling)


def route_hash(
    x_TE: Tensor, gate: PackedWeight, tid2eid_VP: Tensor, tokens_T: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.router.route_hash``: ids from the int64 table, weights from the gate. A token id outside the table
    reads its first or last row. Raises ``ValueError`` as ``route_learned``.
    """
    for name, tensor, dimensions in (("tid2eid_VP", tid2eid_VP, 2), ("tokens_T", tokens_T, 1)):
        if tensor.dtype != torch.int64 or tensor.dim() != dimensions or tensor.device != x_TE.device:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name}: found {found}, expected torch.int64, {dimensions}-d, on {x_TE.device}")
    if tokens_T.shape[0] != x_TE.shape[0]:
        raise ValueError(f"tokens_T: found {tokens_T.shape[0]} tokens, expected {x_TE.shape[0]}")
    _check(x_TE, gate, tid2eid_VP.shape[1])
    return _route(x_TE, gate, None, tid2eid_VP.contiguous(), tokens_T.contiguous(), tid2eid_VP.shape[1], scaling)


def _route(
    x_TE: Tensor,
    gate: PackedWeight,
    bias_X: Tensor | None,
    table_VP: Tensor | None,
    tokens_T: Tensor | None,
    per_token: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    (tokens, width), experts, device = x_TE.shape, gate.shape[0], x_TE.device
    ids_TP = torch.empty((tokens, per_token), dtype=torch.int64, device=device)
    weights_TP = torch.empty((tokens, per_token), dtype=torch.float32, device=device)
    if tokens == 0:
        return ids_TP, weights_TP
    defines = (("PER_LANE", -(-experts // 32)), ("HASH", int(table_VP is not None)))
    selection = (bias_X, table_VP, tokens_T, ids_TP, weights_TP)
    vocabulary = 0 if table_VP is None else table_VP.shape[0]
    if tokens > MAX_DECODE_TOKENS:
        logits_TX = prefill_linear(x_TE, gate, torch.float32).contiguous()
        sizes = (tokens, experts, per_token, vocabulary)
        grid = -(-tokens // _WARPS)
        launch(
            "router", "router_select", grid, _WARPS * 32, logits_TX, *selection, *sizes, float(scaling),
            device=device, defines=defines,
        )  # fmt: skip
        return ids_TP, weights_TP
    x_TE = x_TE.contiguous()
    if x_TE.data_ptr() % 4:
        x_TE = x_TE.clone()
    tiles = -(-experts // 64) * 4
    parts = max(1, min(multiprocessors(device) // tiles, -(-width // 64) * 4 // _WARPS, _MAX_PARTS))
    partial = torch.empty((parts, tokens, tiles * 16), dtype=torch.float32, device=device)
    sizes = (tokens, width, experts, per_token, vocabulary, parts)
    launch(
        "router", "router_decode", tiles * parts, _WARPS * 32, x_TE, gate.data, *selection, partial,
        zeroed_counters(device, "router", 1), *sizes, float(scaling), device=device, defines=defines,
    )  # fmt: skip
    return ids_TP, weights_TP


def _check(x_TE: Tensor, gate: PackedWeight, per_token: int) -> None:
    if x_TE.dtype != torch.bfloat16 or x_TE.dim() != 2:
        raise ValueError(f"x_TE: found {x_TE.dtype} {list(x_TE.shape)}, expected torch.bfloat16 [T, E]")
    if not isinstance(gate, PackedWeight) or gate.format is not QuantFormat.BF16:
        raise ValueError(f"gate: found {gate.format.value}, expected a packed bf16 weight")
    if len(gate.shape) != 2 or gate.shape[1] != x_TE.shape[1] or gate.shape[0] > MAX_EXPERTS:
        raise ValueError(f"gate: found {list(gate.shape)}, expected [X ≤ {MAX_EXPERTS}, {x_TE.shape[1]}]")
    if gate.device != x_TE.device:
        raise ValueError(f"gate: found {gate.device}, expected {x_TE.device}")
    if not 1 <= per_token <= min(gate.shape[0], MAX_EXPERTS_PER_TOKEN):
        most = min(gate.shape[0], MAX_EXPERTS_PER_TOKEN)
        raise ValueError(f"experts_per_token: found {per_token}, expected 1 to {most}")
