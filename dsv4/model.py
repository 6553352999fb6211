"""The architecture: Transformer and Block, on one screen each (spec §2.1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.attention import Attention, AttentionState
from dsv4.layers.head import Embedding, Head
from dsv4.layers.hyper_connection import HyperConnection
from dsv4.layers.moe import MoE
from dsv4.layers.weights import WeightReader, Weights
from dsv4.ops import Ops
from dsv4.state import DecodeState


@dataclass(frozen=True)
class Block:
    """One layer: attention and MoE, each between the two seams of its hyper-connection."""

    attn_hc: HyperConnection
    attn: Attention
    ffn_hc: HyperConnection
    ffn: MoE

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, ops: Ops, ratio: int, hashed: bool, compute_dtype: torch.dtype
    ) -> "Block":
        return cls(
            HyperConnection.build(config, weights, ops, "attn"),
            Attention.build(config, weights.below("attn"), ops, ratio, compute_dtype),
            HyperConnection.build(config, weights, ops, "ffn"),
            MoE.build(config, weights.below("ffn"), ops, hashed),
        )

    def __call__(self, streams_TME: Tensor, tokens_T: Tensor, positions_T: Tensor, state: AttentionState) -> Tensor:
        """Streams ``[T, M, E]`` in and out; there is no other residual path."""
        x_TE, post_TM, comb_TMM = self.attn_hc.pre(streams_TME)
        y_TE = self.attn(x_TE, positions_T, state)
        streams_TME, x_TE, post_TM, comb_TMM = self.ffn_hc.seam(y_TE, streams_TME, post_TM, comb_TMM)
        return self.ffn_hc.post(self.ffn(x_TE, tokens_T), streams_TME, post_TM, comb_TMM)


@dataclass(frozen=True)
class Transformer:
    """The whole model. ``devices[l]`` is where block l lives; the embedding is with the first, the head with the
    last.
    """

    embed: Embedding
    blocks: tuple[Block, ...]
    head: Head
    devices: tuple[torch.device, ...]

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        devices: tuple[torch.device, ...],
        compute_dtype: torch.dtype,
    ) -> "Transformer":
        root = WeightReader(weights, ops)
        blocks = tuple(
            Block.build(config, root.below(f"layers.{layer}"), ops, ratio, hashed, compute_dtype)
            for layer, (ratio, hashed) in enumerate(zip(config.compress_ratios, config.hash_layers, strict=True))
        )
        return cls(Embedding.build(config, root, compute_dtype), blocks, Head.build(config, root, ops), devices)

    def __call__(
        self, tokens_T: Tensor, state: DecodeState, on_block: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Final hidden states ``[T, E]`` of the next T tokens (int64, first device); advances the position by T.

        ``head.logits`` turns the rows one wants into logits. ``on_block`` sees the streams ``[T, M, E]`` after each
        block.
        """
        count = tokens_T.shape[0]
        tokens, positions = {}, {}
        for device, position_1 in state.positions_1.items():
            tokens[device] = tokens_T.to(device)
            positions[device] = position_1 + torch.arange(count, device=device)
            position_1.add_(count)
        streams_TME = self.embed(tokens_T)
        for block, device, layer_state in zip(self.blocks, self.devices, state.layers, strict=True):
            streams_TME = block(streams_TME.to(device), tokens[device], positions[device], layer_state)
            if on_block is not None:
                on_block(streams_TME)
        return self.head.hidden(streams_TME)
