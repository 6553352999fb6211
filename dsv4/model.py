"""The architecture: Segment and Transformer, and the order of a step
(model.md#forward-pass).

``Transformer.__call__`` is the only place that states the order. It writes the step part by part
into ``Parts``: a direct step computes each part at once, a recorded one keeps it to be run,
captured and measured (``dsv4.step``).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.config import ModelConfig
from dsv4.layers.block import Block
from dsv4.layers.head import Embedding, Head
from dsv4.layers.hyper_connection import Unmixed
from dsv4.layers.values import (
    ValueSink,
    show_attention,
    show_experts,
    show_result,
    show_seam,
)
from dsv4.layers.weights import WeightReader, Weights
from dsv4.ops import Ops, Packing
from dsv4.parallel.head_shares import share_head
from dsv4.parallel.placement import Placement
from dsv4.parallel.sharding import local_config

PartKind = Literal[
    "projections", "attention", "experts", "mix", "head", "logits", "sample", "draft"
]


def part_name(kind: PartKind, layer: int | None) -> str:
    """``layer 12 attention``, or the kind alone for what belongs to no layer."""
    return kind if layer is None else f"layer {layer} {kind}"


# Asked in a part of the device to which streams were sent: they are there.
Arrival = Callable[[], Tensor]


class Parts(Protocol):
    """Where a step is written, in order."""

    @property
    def values(self) -> ValueSink:
        """Where the step shows what it computes."""
        ...

    def part(
        self, kind: PartKind, device: torch.device, layer: int | None = None
    ) -> AbstractContextManager[Ops]:
        """The ops for the next part of the step: on ``device``, and of ``layer`` if it has one."""
        ...

    def tokens(self, device: torch.device) -> Tensor:
        """The step's token ids on ``device``, int64 ``[T]``."""
        ...

    def hand_off(self, streams_TME: Tensor, source: torch.device, target: torch.device) -> Arrival:
        """Sends the streams from ``source`` to ``target``."""
        ...


class Outputs(NamedTuple):
    """The result of a step: final hidden states ``[T, E]`` and, if wanted, float32 logits ``[T,
    V]``.
    """

    hidden_TE: Tensor
    logits_TV: Tensor | None


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks on one device; ``layers`` are their indices in the model."""

    device: torch.device
    layers: tuple[int, ...]
    blocks: tuple[Block, ...]

    def __call__(
        self,
        parts: Parts,
        state: DecodeState,
        entering: Arrival | Embedding,
        positions: dict[torch.device, Tensor],
    ) -> Tensor:
        """Writes the blocks: the streams ``[T, M, E]`` behind the last one.

        ``entering``: streams that arrive, or what embeds the step's tokens. A device's first
        segment of a step moves the device's position on and enters its int64 ``[T]`` in
        ``positions``.
        """
        device = self.device
        carried: Tensor | Unmixed | None = None
        for layer, block in zip(self.layers, self.blocks, strict=True):
            with parts.part("projections", device, layer) as ops:
                tokens_T = parts.tokens(device)
                if carried is None:
                    place = state.place(device)
                    carried = self._entered(ops, tokens_T, place, entering, positions)
                x_TE, residual = block.attn_hc.enter(ops, carried)
                projections = block.attn.project(ops, x_TE)
                if isinstance(carried, Unmixed):
                    show_result(parts.values, f"layers.{layer - 1}.ffn.output", ops, carried.y_TE)
                    parts.values.value(f"layers.{layer - 1}.streams", residual.streams_TME)
                show_seam(parts.values, f"layers.{layer}.attn_hc", x_TE, residual)
            with parts.part("attention", device, layer) as ops:
                attended = block.attn.attend(
                    ops, projections, positions[device], state.layers[layer]
                )
                show_attention(
                    parts.values, layer, attended, positions[device], state.layers[layer]
                )
            carried = Unmixed(attended.y_TE, residual)
            # The torch ops would keep the memory of the queries during the experts.
            del attended, projections
            with parts.part("experts", device, layer) as ops:
                x_TE, residual = block.ffn_hc.enter(ops, carried)
                show_result(parts.values, f"layers.{layer}.attn.output", ops, carried.y_TE)
                mixture = block.ffn(ops, x_TE, tokens_T)
                carried = Unmixed(mixture.y_TE, residual)
                show_seam(parts.values, f"layers.{layer}.ffn_hc", x_TE, residual)
                show_experts(parts.values, layer, mixture)
        assert isinstance(carried, Unmixed), "a segment has at least one block"
        with parts.part("mix", device, self.layers[-1]) as ops:
            streams_TME = self.blocks[-1].mix(ops, carried)
            show_result(parts.values, f"layers.{self.layers[-1]}.ffn.output", ops, carried.y_TE)
            parts.values.value(f"layers.{self.layers[-1]}.streams", streams_TME)
            return streams_TME

    def _entered(
        self,
        ops: Ops,
        tokens_T: Tensor,
        place: tuple[Tensor, Tensor],
        entering: Arrival | Embedding,
        positions: dict[torch.device, Tensor],
    ) -> Tensor:
        """The streams in front of the first block."""
        if isinstance(entering, Embedding):
            positions[self.device], streams_TME = entering(ops, tokens_T, *place)
            return streams_TME
        if self.device not in positions:
            positions[self.device] = ops.next_positions(*place, tokens_T.shape[0])
        return entering()


@dataclass(frozen=True)
class Transformer:
    """The whole model. The first segment's device holds the embedding, the last one's the head."""

    embed: Embedding
    segments: tuple[Segment, ...]
    head: Head

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: Weights,
        packing: Packing,
        devices: tuple[torch.device, ...],
        compute_dtype: torch.dtype,
    ) -> "Transformer":
        """``devices[l]`` is where the weights of block l are; matrices are kept as ``packing``
        makes them.
        """
        root = WeightReader(weights, packing)
        kinds = zip(config.compress_ratios, config.hash_layers, strict=True)
        blocks = tuple(
            Block.build(config, root.below(f"layers.{layer}"), ratio, hashed, compute_dtype)
            for layer, (ratio, hashed) in enumerate(kinds)
        )
        segments = []
        for device, run in groupby(range(len(blocks)), key=devices.__getitem__):
            layers = tuple(run)
            segments.append(Segment(device, layers, tuple(blocks[layer] for layer in layers)))
        embed = Embedding.build(config, root, compute_dtype)
        head = Head.build(config, root)
        others = tuple(device for device in dict.fromkeys(devices) if device != devices[-1])
        lm_head = share_head(head.lm_head, (*others, devices[-1]))
        return cls(embed, tuple(segments), replace(head, lm_head=lm_head))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for segment in self.segments for block in segment.blocks)

    @property
    def head_device(self) -> torch.device:
        return self.segments[-1].device

    def __call__(self, parts: Parts, state: DecodeState, logits: bool) -> Outputs:
        """Writes a step of the next T tokens, which moves the position on by T."""
        positions: dict[torch.device, Tensor] = {}
        first, *others = self.segments
        streams_TME = first(parts, state, self.embed, positions)
        source = first.device
        for segment in others:
            arrival = parts.hand_off(streams_TME, source, segment.device)
            streams_TME = segment(parts, state, arrival, positions)
            source = segment.device
        with parts.part("head", source) as ops:
            hidden_TE = self.head.hidden(ops, streams_TME)
            ranks_logits = self.head.logits(ops, hidden_TE) if logits else None
            parts.values.value("hidden", hidden_TE)
        if not logits:
            return Outputs(hidden_TE, None)
        with parts.part("logits", source) as ops:
            logits_TV = ops.gather_logits(ranks_logits)
            parts.values.value("logits", logits_TV)
        return Outputs(hidden_TE, logits_TV)


def build_ranks(
    config: ModelConfig,
    ranks: Sequence[Weights],
    packing: Packing,
    placement: Placement,
    compute_dtype: torch.dtype,
) -> list[Transformer]:
    """The models of all ranks, of what each holds; ``config`` is that of the whole model."""
    local = local_config(config, placement.cuts)
    return [
        Transformer.build(
            local, weights, packing, placement.of_rank(rank).layer_devices, compute_dtype
        )
        for rank, weights in enumerate(ranks)
    ]
