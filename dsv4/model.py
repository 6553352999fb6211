"""The architecture: Block, Segment and Transformer (spec §2.1)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.attention import Attention, AttentionState, Projections
from dsv4.layers.head import Embedding, Head
from dsv4.layers.hyper_connection import HyperConnection, Residual, Unmixed
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

    def open(self, incoming: Tensor | Unmixed) -> tuple[Projections, Residual]:
        """Up to the attention projections: the part before anything depends on the position."""
        x_TE, residual = self.attn_hc.enter(incoming)
        return self.attn.project(x_TE), residual

    def close(self, y_TE: Tensor, residual: Residual, tokens_T: Tensor) -> Unmixed:
        """The rest of the layer after attention's result ``[T, E]``."""
        x_TE, residual = self.ffn_hc.enter(Unmixed(y_TE, residual))
        return Unmixed(self.ffn(x_TE, tokens_T), residual)

    def __call__(
        self, incoming: Tensor | Unmixed, tokens_T: Tensor, positions_T: Tensor, state: AttentionState
    ) -> Unmixed:
        """Streams ``[T, M, E]`` in and out, there is no other residual path; the last result is left for ``mix``."""
        projections, residual = self.open(incoming)
        return self.close(self.attn.attend(projections, positions_T, state), residual, tokens_T)

    def mix(self, unmixed: Unmixed) -> Tensor:
        """The streams ``[T, M, E]`` after the block."""
        return self.ffn_hc.mix(unmixed)


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks on one device; ``layers`` are their indices in the model."""

    device: torch.device
    layers: tuple[int, ...]
    blocks: tuple[Block, ...]

    def __call__(
        self,
        streams_TME: Tensor,
        tokens_T: Tensor,
        positions_T: Tensor,
        state: DecodeState,
        on_block: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """The streams ``[T, M, E]`` after the last block, everything on ``device``."""
        carried: Tensor | Unmixed = streams_TME
        for layer, block in zip(self.layers, self.blocks, strict=True):
            carried = block(carried, tokens_T, positions_T, state.layers[layer])
            if on_block is not None:
                on_block(block.mix(carried))
        assert isinstance(carried, Unmixed), "a segment has at least one block"
        return self.blocks[-1].mix(carried)


@dataclass(frozen=True)
class Transformer:
    """The whole model. The embedding is on the first segment's device, the head on the last one's."""

    ops: Ops
    embed: Embedding
    segments: tuple[Segment, ...]
    head: Head

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        devices: tuple[torch.device, ...],
        compute_dtype: torch.dtype,
    ) -> "Transformer":
        """``devices[l]`` is where the weights of block l are."""
        root = WeightReader(weights, ops)
        blocks = tuple(
            Block.build(config, root.below(f"layers.{layer}"), ops, ratio, hashed, compute_dtype)
            for layer, (ratio, hashed) in enumerate(zip(config.compress_ratios, config.hash_layers, strict=True))
        )
        segments = []
        for device, run in groupby(range(len(blocks)), key=devices.__getitem__):
            layers = tuple(run)
            segments.append(Segment(device, layers, tuple(blocks[layer] for layer in layers)))
        embed, head = Embedding.build(config, root, ops, compute_dtype), Head.build(config, root, ops)
        return cls(ops, embed, tuple(segments), head)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for segment in self.segments for block in segment.blocks)

    def __call__(
        self, tokens_T: Tensor, state: DecodeState, on_block: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Final hidden states ``[T, E]`` of the next T tokens (int64); advances the position by T.

        ``logits`` turns the rows one wants into logits. ``on_block`` sees the streams ``[T, M, E]`` after each block.
        ``tokens_T`` may be anywhere; ``state.token_input`` puts ids where no device waits for another because of them.
        """
        tokens = {device: tokens_T.to(device, non_blocking=True) for device in state.devices}
        positions: dict[torch.device, Tensor] = {}
        streams_TME: Tensor | None = None
        for segment in self.segments:
            device = segment.device
            arrived_TME = None if streams_TME is None else state.bring(streams_TME, device)
            with on_device(device):
                streams_TME = self.begin(device, arrived_TME, tokens[device], positions, state)
                streams_TME = segment(streams_TME, tokens[device], positions[device], state, on_block)
        assert streams_TME is not None, "a model has at least one segment"
        with on_device(self.segments[-1].device):
            return self.head.hidden(streams_TME)

    def begin(
        self,
        device: torch.device,
        arrived_TME: Tensor | None,
        tokens_T: Tensor,
        positions: dict[torch.device, Tensor],
        state: DecodeState,
    ) -> Tensor:
        """The streams ``[T, M, E]`` that a segment on ``device`` starts from; nothing arrives at the first one, which
        embeds the tokens.

        A device's first segment of a step moves the device's position on and enters its int64 ``[T]`` in ``positions``,
        the others reuse them.
        """
        position_1 = state.positions_1[device]
        if arrived_TME is None:
            positions[device], arrived_TME = self.embed(tokens_T, position_1)
        elif device not in positions:
            positions[device] = self.ops.next_positions(position_1, tokens_T.shape[0])
        return arrived_TME

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """float32 ``[T, V]`` of final hidden states."""
        with on_device(self.segments[-1].device):
            return self.head.logits(hidden_TE)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, which launches and allocations expect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
