"""Modules with the class, attribute and argument names of vLLM's DeepSeek-V4 (commits in
docs/hooks/vllm_trace.py), and arithmetic of a few lines. A rank holds its heads; what vLLM reduces
before it returns is computed whole.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 4
HEAD_DIM = 8
ROPE_DIM = 4
WIDTH = 6
STREAMS = 2
EXPERTS = 5
VOCABULARY = 11
TOP_ENTRIES = 3


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mhc_post_tilelang(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor
) -> Tensor:
    """The streams after a sublayer; found by the name of the layer's module."""
    mixed = torch.einsum("tjk,tje->tke", comb_res_mix, residual)
    return mixed + post_layer_mix * x.unsqueeze(1)


class Linear(nn.Module):
    """ReplicatedLinear: returns (output, bias)."""

    def __init__(self, columns: int, seed: int) -> None:
        super().__init__()
        self.weight = values(columns, WIDTH, seed=seed)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class DeepseekV4Indexer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weights_proj = Linear(2, seed)


class DeepseekV4Attention(nn.Module):
    def __init__(self, seed: int, rank: int, ranks: int, buffer: Tensor | None) -> None:
        super().__init__()
        self.n_local_heads = HEADS // ranks
        self.padded_heads = self.n_local_heads + 1
        self.first_head = rank * self.n_local_heads
        angles = torch.arange(32).unsqueeze(1) * torch.tensor([1.0, 0.1])
        cache = torch.cat((angles.cos(), angles.sin()), 1)
        self.rotary_emb = SimpleNamespace(cos_sin_cache=cache)
        self.topk_indices_buffer = buffer
        self.indexer = None
        if buffer is not None:
            self.indexer = DeepseekV4Indexer(seed + 1)
        self.weight = values(WIDTH, HEADS * HEAD_DIM, seed=seed)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        every_q = (hidden_states @ self.weight).unflatten(-1, (HEADS, HEAD_DIM))
        heads = slice(self.first_head, self.first_head + self.n_local_heads)
        q = every_q.new_zeros(len(positions), self.padded_heads, HEAD_DIM)
        q[:, : self.n_local_heads] = every_q[:, heads]
        output = torch.full_like(q, torch.nan)
        if self.indexer is not None:
            assert self.topk_indices_buffer is not None
            self.indexer.weights_proj(hidden_states)
            self.topk_indices_buffer[: len(positions)] = positions.unsqueeze(1) // 4 - 1
        self.forward_mqa(q, every_q[:, 0], positions, output)
        return every_q.sum(1) @ torch.ones(HEAD_DIM, WIDTH)

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Writes in place; the backend's subclass has it."""
        output.copy_(2 * q)


class BaseRouter:
    def select_experts(
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        weights, ids = router_logits.softmax(-1).topk(2)
        return weights, ids.int()


class MoERunner(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.router = BaseRouter()
        self.gate = Linear(EXPERTS, seed)

    def forward(
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        logits, _ = self.gate(hidden_states)
        weights, _ = self.router.select_experts(hidden_states=hidden_states, router_logits=logits)
        return hidden_states * weights.sum(-1, keepdim=True)


class DeepseekV4MegaMoEExperts(nn.Module):
    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return hidden_states * topk_weights.sum(-1, keepdim=True)


class DeepseekV4MoE(nn.Module):
    def __init__(self, seed: int, mega: bool) -> None:
        super().__init__()
        self.use_mega_moe = mega
        runner = MoERunner(seed)
        self.experts = DeepseekV4MegaMoEExperts() if mega else runner
        self._select = runner

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        if not self.use_mega_moe:
            return self.experts(
                hidden_states=hidden_states, router_logits=hidden_states, input_ids=input_ids
            )
        logits, _ = self._select.gate(hidden_states)
        weights, ids = BaseRouter().select_experts(hidden_states, logits)
        return self.experts(hidden_states, weights, ids)


class DeepseekV4DecoderLayer(nn.Module):
    def __init__(self, attn: DeepseekV4Attention, ffn: DeepseekV4MoE) -> None:
        super().__init__()
        self.attn = attn
        self.ffn = ffn

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        input_ids: Tensor | None,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = len(positions)
        post = torch.full((tokens, STREAMS, 1), 0.5)
        comb = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).expand(tokens, 2, 2)
        if residual is not None:
            assert post_mix is not None
            assert res_mix is not None
            x = mhc_post_tilelang(x, residual, post_mix, res_mix)
        y = self.attn(positions, x.mean(1), None)
        residual = mhc_post_tilelang(y, x, post, comb)
        return self.ffn(residual.mean(1), input_ids), residual, post, comb


class DeepseekV4Model(nn.Module):
    def __init__(self, rank: int, ranks: int, mega: bool) -> None:
        super().__init__()
        self.start_layer = 0
        self.end_layer = 2
        self.topk_indices_buffer = torch.zeros(32, TOP_ENTRIES, dtype=torch.int32)
        buffers = (None, self.topk_indices_buffer)
        self.layers = nn.ModuleList(
            DeepseekV4DecoderLayer(
                DeepseekV4Attention(10 * layer, rank, ranks, buffer),
                DeepseekV4MoE(10 * layer + 5, mega),
            )
            for layer, buffer in enumerate(buffers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.embedding = values(VOCABULARY, WIDTH, seed=99)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x: Tensor = self.embedding[input_ids].unsqueeze(-2).repeat(1, STREAMS, 1)
        residual = post = comb = None
        for layer in self.layers:
            x, residual, post, comb = layer(x, positions, input_ids, post, comb, residual)
        assert residual is not None
        assert post is not None
        assert comb is not None
        return self.norm(mhc_post_tilelang(x, residual, post, comb).mean(1))


class DeepseekV4ForCausalLM(nn.Module):
    """``gathers``: whether this rank gets the gathered logits."""

    def __init__(self, rank: int, ranks: int, mega: bool, gathers: bool) -> None:
        super().__init__()
        self.model = DeepseekV4Model(rank, ranks, mega)
        self.gathers = gathers

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions, None, None)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return hidden_states @ self.model.embedding.T if self.gathers else None
