"""DSpark: stages that draft a block of tokens at once (model.md#dspark).

A stage's keys of the sequence come from ``main_x``, a projection of the main model's streams behind
some layers; only the block's own keys come from the stage's input. The block is the last token and
noise tokens behind it. Its i-th row drafts the token behind the i-th one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.config import DSpark as DSparkKeys
from dsv4.config import ModelConfig
from dsv4.layers.draft_stage import DraftStage, within_block
from dsv4.layers.head import Embedding, Head
from dsv4.layers.hyper_connection import Unmixed
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.drafts import DraftOps
from dsv4.ops.hyper_connection import hc_collapse
from dsv4.ops.linear import RowList
from dsv4.ops.linear.row_list import choose_rows
from dsv4.ops.markov import confidence
from dsv4.weights.quant import Weight

# The draft of slot i, int64 ``[1]``, by its logits float32 ``[V]``.
Choose = Callable[[int, Tensor], Tensor]


class BlockOutputs(NamedTuple):
    """Of every draft of a block: collapsed streams ``[B, E]`` and float32 logits ``[B, V]``, both
    without what the token before it adds.
    """

    collapsed_BE: Tensor
    logits_BV: Tensor


class Drafts(NamedTuple):
    """Tokens int64 ``[B]``, the logits that chose them ``[B, V]`` and how likely each is to be
    accepted behind the others, ``[B]``, both float32.
    """

    tokens_B: Tensor
    logits_BV: Tensor
    confidence_B: Tensor


@dataclass(frozen=True)
class DSpark:
    """``embed`` and the matrix of ``head`` are those of the main model. ``key_rows``: wkv of every
    stage, which multiply ``main_x``.
    """

    keys: DSparkKeys
    embed: Embedding
    main_proj: Weight
    main_norm: Tensor
    key_rows: RowList
    stages: tuple[DraftStage, ...]
    head: Head
    markov_w1_VR: Tensor
    markov_w2: Weight
    confidence: Weight
    norm_eps: float

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: WeightReader,
        stages: int,
        embed: Embedding,
        head: Head,
        compute_dtype: torch.dtype,
    ) -> "DSpark":
        """``weights``: those of ``mtp``."""
        assert config.dspark is not None
        first = weights.below("0")
        last = weights.below(str(stages - 1))
        blocks = tuple(
            DraftStage.of_module(config, weights.below(str(stage)), compute_dtype)
            for stage in range(stages)
        )
        return cls(
            keys=config.dspark,
            embed=embed,
            main_proj=first.matrix("main_proj.weight"),
            main_norm=first.vector("main_norm.weight"),
            key_rows=choose_rows([block.key_row for block in blocks]),
            stages=blocks,
            head=Head.sharing(config, last, head),
            markov_w1_VR=last.stored_matrix("markov_head.markov_w1.weight").data,
            markov_w2=last.matrix("markov_head.markov_w2.weight"),
            confidence=last.matrix("confidence_head.proj.weight"),
            norm_eps=config.rms_norm_eps,
        )

    def remember(
        self,
        ops: Ops,
        drafts: DraftOps,
        taps: Sequence[Tensor],
        positions_T: Tensor,
        state: DraftState,
    ) -> None:
        """Stores the keys of the tokens at consecutive int64 ``positions`` in every stage; ``taps``
        are the streams ``[T, M, E]`` behind each target layer.
        """
        main_TE = ops.linear(drafts.stream_means(taps), self.main_proj)
        products = ops.linear_rows(main_TE, self.key_rows, self.main_norm, self.norm_eps)
        for stage, keys, kv_TD in zip(self.stages, state.stages, products, strict=True):
            stage.write_keys(drafts, kv_TD, positions_T, keys)

    def block(
        self, ops: Ops, drafts: DraftOps, tokens_B: Tensor, state: DraftState
    ) -> BlockOutputs:
        """The stages on the block's tokens int64 ``[B]``, as ``run``."""
        streams_BME, _, logits_BV = self.run(ops, drafts, tokens_B, state)
        return BlockOutputs(hc_collapse(streams_BME, self.head.collapse), logits_BV)

    def run(
        self, ops: Ops, drafts: DraftOps, tokens_B: Tensor, state: DraftState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The streams ``[B, M, E]`` behind the stages, the block's positions from
        ``state.position_1`` on, which it moves, and float32 logits ``[B, V]`` without what the
        token before each draft adds.
        """
        lookup = (state.position_1, state.rejected_1)
        positions_B, streams_BME = self.embed(ops, tokens_B, *lookup)
        carried: Tensor | Unmixed = streams_BME
        for stage, keys in zip(self.stages, state.stages, strict=True):
            carried = stage(ops, carried, tokens_B, within_block(drafts, positions_B, keys))
        assert isinstance(carried, Unmixed), "there is at least one stage"
        streams_BME = self.stages[-1].mix(ops, carried)
        logits_BV = self.head.whole_logits(ops, self.head.hidden(ops, streams_BME))
        return streams_BME, positions_B, logits_BV

    def draft(
        self, drafts: DraftOps, block: BlockOutputs, anchor_1: Tensor, choose: Choose
    ) -> Drafts:
        """The drafts behind the int64 ``[1]`` token that the block begins with, one after the
        other, because each changes the logits of the next.
        """
        previous_1 = anchor_1
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        found: list[Tensor] = []
        for slot, base_V in enumerate(block.logits_BV):
            read = (previous_1, self.markov_w1_VR)
            found.append(confidence(block.collapsed_BE[slot], *read, self.confidence))
            logits.append(drafts.markov_logits(base_V, *read, self.markov_w2))
            previous_1 = choose(slot, logits[-1])
            tokens.append(previous_1)
        return Drafts(torch.cat(tokens), torch.stack(logits), torch.stack(found).sigmoid())
