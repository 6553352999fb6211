"""A block of a draft module: as a layer of ratio 0 with a learned router."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.layer import AttentionState, KeySet
from dsv4.config import ModelConfig
from dsv4.layers.attention import Attention, Projections
from dsv4.layers.hyper_connection import HyperConnection, Unmixed
from dsv4.layers.moe import MoE
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.drafts import DraftOps
from dsv4.ops.linear import RowList
from dsv4.ops.prepare_attention import Queries

# Writes a block's attention at the positions that the caller knows: ``[T, E]``.
Attend = Callable[[Ops, Attention, Projections], Tensor]


@dataclass(frozen=True)
class DraftStage:
    """Attention and MoE, each between the two seams of its hyper-connection."""

    attn_hc: HyperConnection
    attn: Attention
    ffn_hc: HyperConnection
    ffn: MoE

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, compute_dtype: torch.dtype
    ) -> "DraftStage":
        return cls(
            HyperConnection.build(config, weights, "attn"),
            Attention.build(config, weights.below("attn"), 0, compute_dtype),
            HyperConnection.build(config, weights, "ffn"),
            MoE.build(config, weights.below("ffn"), hashed=False),
        )

    def __call__(
        self, ops: Ops, entering: Tensor | Unmixed, tokens_T: Tensor, attend: Attend
    ) -> Unmixed:
        """The block on the streams ``[T, M, E]`` of the tokens int64 ``[T]``."""
        x_TE, residual = self.attn_hc.enter(ops, entering)
        y_TE = attend(ops, self.attn, self.attn.project(ops, x_TE))
        x_TE, residual = self.ffn_hc.enter(ops, Unmixed(y_TE, residual))
        return Unmixed(self.ffn(ops, x_TE, tokens_T).y_TE, residual)

    def mix(self, ops: Ops, unmixed: Unmixed) -> Tensor:
        """The streams ``[T, M, E]`` after the block."""
        return self.ffn_hc.mix(ops, unmixed)

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
