"""A fast training forward over the modules of transformers' ``DeepseekV4ForCausalLM``.

The parameters and sub-modules are transformers'. Only slow pieces are replaced by equal ones:
attention works on blocks of the window instead of a full mask (``fast_attention``), all experts are
computed and weighted by a scattered routing matrix, and Sinkhorn is one kernel.
``tests/demo/test_fast_forward.py`` holds the result equal to that of the unpatched model. Two
things are added: the quantised key rows of the engine, and the indexer's loss, which transformers
lacks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.demo.training.fast_attention import Options, Rope, attention


@dataclass(frozen=True)
class Kernels:
    """Replaceable pieces: the Sinkhorn implementation and the (compiled) decoder block."""

    sinkhorn: Callable[[Tensor, int, float], Tensor]
    block: Callable[..., tuple[Tensor, Tensor, Tensor]]


def plain_sinkhorn(a: Tensor, iterations: int, eps: float) -> Tensor:
    """Sinkhorn of logits ``[..., 4, 4]`` in torch (model.md#sinkhorn)."""
    c = a.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def rope_tables(model: Any, length: int, device: torch.device | str) -> dict[str, Rope]:
    """float32 cos and sin ``[1, length, 32]`` of both tables, by the model's own rotary module."""
    probe = torch.zeros(1, device=device)
    positions = torch.arange(length, device=device)[None]
    return {
        name: model.model.rotary_emb(probe, positions, layer_type=name)
        for name in ("main", "compress")
    }


def forward(
    model: Any, ids: Tensor, ropes: dict[str, Rope], options: Options, kernels: Kernels
) -> tuple[Tensor, ...]:
    """Final normalised hidden states ``[B, S, E]``, expert loads ``[layers, X]`` and the summed
    indexer loss.
    """
    streams = (
        model.model.embed_tokens(ids)
        .unsqueeze(2)
        .expand(-1, -1, model.config.hc_mult, -1)
        .contiguous()
    )
    loads = []
    losses = []
    for layer in model.model.layers:
        rope = ropes[layer.self_attn.rope_layer_type]
        streams, load, loss = kernels.block(layer, streams, ids, rope, options, kernels.sinkhorn)
        loads.append(load)
        losses.append(loss)
    hidden = model.model.norm(model.model.hc_head(streams))
    return hidden, torch.stack(loads), torch.stack(losses).sum()


def block(
    layer: Any,
    streams: Tensor,
    ids: Tensor,
    rope: Rope,
    options: Options,
    sinkhorn: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer on streams ``[B, S, 4, E]``; returns streams, expert load ``[X]`` and
    indexer loss (0-d).
    """
    post, comb, x = mix_in(layer.attn_hc, streams, sinkhorn)
    y, loss = attention(layer.self_attn, layer.input_layernorm(x), rope, options)
    streams = mix_out(streams, y, post, comb)
    post, comb, x = mix_in(layer.ffn_hc, streams, sinkhorn)
    y, load = experts(layer.mlp, layer.post_attention_layernorm(x), ids)
    return mix_out(streams, y, post, comb), load, loss


def mix_in(
    hc: Any, streams: Tensor, sinkhorn: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """HCpre (model.md#seams): post ``[B, S, 4]``, comb ``[B, S, 4, 4]`` and the collapsed input
    ``[B, S, E]``.
    """
    n = hc.hc_mult
    flat = streams.flatten(2)
    inverse_rms = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + hc.input_norm.eps)
    mixes = F.linear(flat, hc.fn.to(flat.dtype)).float() * inverse_rms
    pre = torch.sigmoid(mixes[..., :n] * hc.scale[0] + hc.base[:n]) + hc.hc_eps
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * hc.scale[1] + hc.base[n : 2 * n])
    logits = mixes[..., 2 * n :] * hc.scale[2] + hc.base[2 * n :]
    comb = sinkhorn(logits.unflatten(-1, (n, n)).contiguous(), hc.hc_sinkhorn_iters, hc.hc_eps)
    collapsed = sum(pre[..., i, None] * streams[:, :, i].float() for i in range(n))
    return post, comb, collapsed.to(streams.dtype)  # type: ignore[union-attr]


def mix_out(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """HCpost (model.md#seams): the new streams ``[B, S, 4, E]``."""
    n = streams.shape[2]
    new = []
    for k in range(n):
        mixed = sum(comb[..., j, k, None] * streams[:, :, j].float() for j in range(n))
        new.append((post[..., k, None] * y.float() + mixed).to(streams.dtype))
    return torch.stack(new, dim=2)


def experts(moe: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Routed plus shared experts ``[B, S, E]``, every expert computed for every token; and tokens
    per expert ``[X]``.
    """
    router_input = x.to(moe.gate.weight.dtype)
    _, weights, indices = moe.gate(router_input, ids) if moe.is_hash else moe.gate(router_input)
    bank = moe.experts
    routing = torch.zeros(weights.shape[0], bank.num_experts, dtype=weights.dtype, device=x.device)
    routing = routing.scatter(1, indices, weights)
    flat = x.flatten(0, 1)
    gate_up = F.linear(flat, bank.gate_up_proj.flatten(0, 1)).unflatten(-1, (bank.num_experts, -1))
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = F.silu(gate.clamp(max=bank.limit)) * up.clamp(min=-bank.limit, max=bank.limit)
    hidden = (hidden * routing.to(hidden.dtype).unsqueeze(-1)).flatten(1)
    down = bank.down_proj.transpose(0, 1).flatten(1)
    return (F.linear(hidden, down)).view_as(x) + moe.shared_experts(x), (routing > 0).sum(0).float()
