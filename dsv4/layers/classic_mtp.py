"""Classic MTP: one block that reads the streams of a position and the token behind it
(model.md#speculative-modules).

A row at position t takes the streams behind the last main layer and token t + 1, and its logits
choose token t + 2. Further drafts are rows at the following positions, which take the block's own
streams instead.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.config import ModelConfig
from dsv4.layers.draft_stage import DraftStage, causal
from dsv4.layers.head import Embedding, Head
from dsv4.layers.hyper_connection import Residual, Unmixed
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.drafts import DraftOps
from dsv4.ops.linear import RowList
from dsv4.ops.linear.row_list import choose_rows


class Rows(NamedTuple):
    """Rows of the module: the tokens behind their positions int64 ``[T]``, the streams of their
    positions ``[T, M, E]``, and the int64 ``[1]`` position and rejected tokens that the look-up of
    the first token reads (``dsv4.ops.opening``).
    """

    tokens_T: Tensor
    streams_TME: Tensor
    position_1: Tensor
    rejected_1: Tensor


@dataclass(frozen=True)
class ClassicMTP:
    """``embed`` and the matrix of ``head`` are those of the main model."""

    embed: Embedding
    token_rows: RowList
    token_norm: Tensor
    stream_rows: RowList
    stream_norm: Tensor
    stage: DraftStage
    key_rows: RowList
    head: Head
    norm_eps: float

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: WeightReader,
        embed: Embedding,
        head: Head,
        compute_dtype: torch.dtype,
    ) -> "ClassicMTP":
        """``weights``: those of ``mtp.0``."""
        stage = DraftStage.of_module(config, weights, compute_dtype)
        return cls(
            replace(embed, streams=1),
            weights.row_list(["e_proj.weight"], [None]),
            weights.vector("enorm.weight"),
            weights.row_list(["h_proj.weight"], [None]),
            weights.vector("hnorm.weight"),
            stage,
            choose_rows([stage.key_row]),
            Head.sharing(config, weights, head),
            config.rms_norm_eps,
        )

    def remember(self, ops: Ops, drafts: DraftOps, rows: Rows, keys: KeySet) -> None:
        """Stores the keys of rows whose logits nobody wants: they depend on no other row."""
        positions_T, entering = self._enter(ops, drafts, rows)
        x_TE, _ = self.stage.attn_hc.enter(ops, entering)
        (kv_TD,) = ops.linear_rows(x_TE, self.key_rows)
        self.stage.write_keys(drafts, kv_TD, positions_T, keys)

    def __call__(
        self, ops: Ops, drafts: DraftOps, rows: Rows, keys: KeySet
    ) -> tuple[Tensor, Tensor]:
        """The streams behind the block ``[T, M, E]`` and the logits float32 ``[T, V]``."""
        positions_T, entering = self._enter(ops, drafts, rows)
        behind = self.stage(ops, entering, rows.tokens_T, causal(positions_T, keys))
        streams_TME = self.stage.mix(ops, behind)
        logits_TV = self.head.whole_logits(ops, self.head.hidden(ops, streams_TME))
        return streams_TME, logits_TV

    def _enter(self, ops: Ops, drafts: DraftOps, rows: Rows) -> tuple[Tensor, Unmixed]:
        """The positions of the rows, and e_proj · rms_norm(e; enorm) + h_proj · rms_norm(s; hnorm)
        for every stream s, without the first part at position 0.
        """
        positions_T, e_T1E = self.embed(ops, rows.tokens_T, rows.position_1, rows.rejected_1)
        eps = self.norm_eps
        (y_TE,) = ops.linear_rows(e_T1E.squeeze(1), self.token_rows, self.token_norm, eps)
        mixed_TME = drafts.stream_linear(rows.streams_TME, self.stream_rows, self.stream_norm, eps)
        # The sum is a residual mix in which every stream stays what it is.
        mixing = drafts.token_mixing(positions_T, mixed_TME.shape[1])
        return positions_T, Unmixed(y_TE, Residual(mixed_TME, *mixing))
