"""A block of a draft module: as a layer of ratio 0 with a learned router."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dsv4.caches.layer import AttentionState, KeySet
from dsv4.config import ModelConfig
from dsv4.layers.attention import Attention, Projections
from dsv4.layers.block import Block
from dsv4.layers.hyper_connection import Unmixed
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.drafts import DraftOps
from dsv4.ops.linear import RowList
from dsv4.ops.prepare_attention import Queries

# Writes a block's attention at the positions that the caller knows: ``[T, E]``.
Attend = Callable[[Ops, Attention, Projections], Tensor]


@dataclass(frozen=True)
class DraftStage(Block):
    """A block whose caller says which keys its attention reads."""

    @classmethod
    def of_module(
        cls, config: ModelConfig, weights: WeightReader, compute_dtype: torch.dtype
    ) -> Self:
        """A stage: no compressed entries, a learned router."""
        return cls.build(config, weights, 0, False, compute_dtype)

    def __call__(
        self, ops: Ops, entering: Tensor | Unmixed, tokens_T: Tensor, attend: Attend
    ) -> Unmixed:
        """The block on the streams ``[T, M, E]`` of the tokens int64 ``[T]``."""
        x_TE, residual = self.attn_hc.enter(ops, entering)
        y_TE = attend(ops, self.attn, self.attn.project(ops, x_TE))
        x_TE, residual = self.ffn_hc.enter(ops, Unmixed(y_TE, residual))
        return Unmixed(self.ffn(ops, x_TE, tokens_T).y_TE, residual)

    @property
    def key_row(self) -> tuple[RowList, int]:
        """wkv as a matrix of a list (``dsv4.ops.linear.row_list.choose_rows``)."""
        return self.attn.input_rows, 1

    def write_keys(
        self, drafts: DraftOps, kv_TD: Tensor, positions_T: Tensor, keys: KeySet
    ) -> None:
        """Stores the products kv ``[T, D]`` with wkv as keys of int64 ``positions``."""
        norm = self.attn.norm
        ring = keys.ring
        drafts.kv_write(kv_TD, norm.kv_norm, positions_T, norm.inv_freq, ring, norm.eps)


def causal(positions_T: Tensor, keys: KeySet) -> Attend:
    """Attention as in a layer of the main model; it stores the keys of the tokens."""

    def attend(ops: Ops, attn: Attention, projections: Projections) -> Tensor:
        state = AttentionState(keys, None, None)
        return attn.attend(ops, projections, positions_T, state).y_TE

    return attend


def within_block(drafts: DraftOps, positions_T: Tensor, keys: KeySet) -> Attend:
    """Attention of the tokens of a block to each other and to the window before it; it stores the
    keys of the tokens.
    """

    def attend(ops: Ops, attn: Attention, projections: Projections) -> Tensor:
        q_THD = projections.q_TN.unflatten(-1, (-1, attn.config.head_dim))
        queries = ops.prepare_attention(
            Queries(q_THD, None), projections.kv_TD, positions_T, attn.norm, keys.ring, ()
        )
        inv_freq = attn.norm.inv_freq
        heads_THD = drafts.block_attention(queries.q_THD, keys, attn.sink_H, positions_T, inv_freq)
        return attn.output(ops, heads_THD)

    return attend
