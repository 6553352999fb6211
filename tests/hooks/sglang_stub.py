"""Modules with the class, attribute and argument names of SGLang's DeepSeek-V4 (commit in
docs/hooks/sglang_trace.py), and arithmetic of a few lines. A rank holds its heads and its part of
the vocabulary; what SGLang reduces before it returns is computed whole.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HEADS = 4
HEAD_DIM = 8
WIDTH = 6
STREAMS = 2
EXPERTS = 5
VOCABULARY = 11
PADDED_VOCABULARY = 12
SCALE = 1.5


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class MQALayer(nn.Module):
    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.n_local_heads = HEADS // ranks
        self.first_head = rank * self.n_local_heads
        self.weight = values(WIDTH, HEADS * HEAD_DIM, seed=seed)

    def _compute_q_b(self, q: Tensor, positions: Tensor, q_out: Tensor | None = None) -> Tensor:
        heads = slice(self.first_head, self.first_head + self.n_local_heads)
        return (q @ self.weight).unflatten(-1, (HEADS, HEAD_DIM))[:, heads]

    def forward(
        self, x: Tensor, positions: Tensor, forward_batch: Any, x_quant: Tensor | None = None
    ) -> Tensor:
        self._compute_q_b(x, positions, None)
        return x + 1


class TopK(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = values(EXPERTS, WIDTH, seed=seed)

    def forward(self, hidden_states: Tensor, router_logits: Tensor | None) -> StandardTopKOutput:
        logits = hidden_states @ self.weight.T
        weights, ids = logits.softmax(-1).topk(2)
        return StandardTopKOutput(weights, ids.int(), logits)


class FusedMoE(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.should_fuse_routed_scaling_factor_in_topk = fused


class DeepseekV2MoE(nn.Module):
    def __init__(self, seed: int, fused: bool) -> None:
        super().__init__()
        self.routed_scaling_factor = SCALE
        self.topk = TopK(seed)
        self.experts = FusedMoE(fused)

    def forward(
        self,
        hidden_states: Tensor,
        forward_batch: Any,
        input_ids: Tensor | None = None,
        input_ids_global: Tensor | None = None,
    ) -> Tensor:
        return hidden_states * self.topk(hidden_states, None).topk_weights.sum(-1, keepdim=True)


class DeepseekV4DecoderLayer(nn.Module):
    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.self_attn = MQALayer(seed, rank, ranks)
        self.mlp = DeepseekV2MoE(seed + 1, fused=seed == 0)
        self.hc_attn_fn = nn.Parameter(values(3, seed=seed + 2))
        self.hc_ffn_fn = nn.Parameter(values(3, seed=seed + 3))

    def hc_pre(
        self,
        x: Tensor,
        hc_fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        norm: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        post = hc_fn[:2].expand(len(x), 2)
        comb = hc_fn.sum() * torch.eye(2).expand(len(x), 2, 2)
        return x.mean(1), post, comb, True

    def hc_post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = torch.einsum("tjk,tje->tke", comb, residual)
        return mixed + post.unsqueeze(-1) * x.unsqueeze(1)

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        input_ids: Tensor,
        forward_batch: Any,
        input_ids_global: Tensor,
    ) -> Tensor:
        nothing = torch.empty(0)
        residual = hidden_states
        x, post, comb, _ = self.hc_pre(hidden_states, self.hc_attn_fn, nothing, nothing, norm=None)
        x = self.self_attn(x=x, positions=positions, forward_batch=forward_batch, x_quant=None)
        residual = self.hc_post(x, residual, post, comb)
        x, post, comb, _ = self.hc_pre(residual, self.hc_ffn_fn, nothing, nothing, norm=None)
        x = self.mlp(x, forward_batch, input_ids=input_ids, input_ids_global=input_ids_global)
        return self.hc_post(x, residual, post, comb)


class DeepseekV4Model(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.start_layer = 0
        self.end_layer = 2
        self.layers = nn.ModuleList(
            DeepseekV4DecoderLayer(10 * layer, rank, ranks) for layer in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.embedding = values(VOCABULARY, WIDTH, seed=99)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        streams: Tensor = self.embedding[input_ids].unsqueeze(1).repeat(1, STREAMS, 1)
        for layer in self.layers:
            streams = layer(
                positions=positions,
                hidden_states=streams,
                forward_batch=forward_batch,
                input_ids=input_ids,
                input_ids_global=input_ids,
            )
        return self.norm(streams.mean(1))


class ParallelLMHead(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        whole = values(PADDED_VOCABULARY, WIDTH, seed=98)
        self.weight = nn.Parameter(whole.chunk(ranks)[rank].clone())


class DeepseekV4ForCausalLM(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.model = DeepseekV4Model(rank, ranks)
        self.lm_head = ParallelLMHead(rank, ranks)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        hidden_states = self.model.forward(input_ids, positions, forward_batch)
        return hidden_states[-1:] @ self.lm_head.weight.T
