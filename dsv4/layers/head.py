"""Both ends of the model: embedding into M streams; collapse → norm → logits (model.md#head)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.hyper_connection import HcHeadWeights
from dsv4.weights.quant import Weight


@dataclass(frozen=True)
class Embedding:
    """Token embedding, repeated into M equal streams; no scaling."""

    table_VE: Tensor
    streams: int
    compute_dtype: torch.dtype

    @classmethod
    def build(
        cls, config: ModelConfig, weights: WeightReader, compute_dtype: torch.dtype
    ) -> "Embedding":
        table_VE = weights.stored_matrix("embed.weight").data
        if compute_dtype.itemsize < table_VE.itemsize:
            table_VE = table_VE.to(compute_dtype)  # rounds once what every look-up would round
        return cls(table_VE, config.hc_mult, compute_dtype)

    def __call__(
        self, ops: Ops, tokens_T: Tensor, position_1: Tensor, rejected_1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """int64 ``[T]`` → their positions, int64 ``[T]``, by which ``position_1`` moves on, and the
        streams ``[T, M, E]`` in the compute dtype. ``rejected_1``: see ``dsv4.ops.opening``.
        """
        return ops.embed(
            tokens_T, position_1, rejected_1, self.table_VE, self.streams, self.compute_dtype
        )


@dataclass(frozen=True)
class Head:
    """Streams after the last block → final hidden state → float32 logits."""

    collapse: HcHeadWeights
    norm: Tensor
    lm_head: Weight

    @classmethod
    def build(cls, config: ModelConfig, weights: WeightReader) -> "Head":
        collapse, norm = _own_parts(config, weights)
        return cls(collapse, norm, weights.matrix("head.weight"))

    @classmethod
    def sharing(cls, config: ModelConfig, weights: WeightReader, main: "Head") -> "Head":
        """A head of a draft module: its own collapse and norm, the matrix of the ``main`` one."""
        return cls(*_own_parts(config, weights), main.lm_head)

    def hidden(self, ops: Ops, streams_TME: Tensor) -> Tensor:
        """RMSNorm of the collapsed streams ``[T, E]``, in the compute dtype."""
        return ops.hc_head(streams_TME, self.collapse, self.norm)

    def logits(self, ops: Ops, hidden_TE: Tensor) -> Any:
        """float32 ``[T, V]``: the rounded norm output times the head in float32; with several
        ranks what ``ops.gather_logits`` makes them of.
        """
        return ops.vocab_parallel_linear(hidden_TE, self.lm_head)

    def whole_logits(self, ops: Ops, hidden_TE: Tensor) -> Tensor:
        """``logits`` of the whole vocabulary, whatever the number of ranks."""
        return ops.gather_logits(self.logits(ops, hidden_TE))


def _own_parts(config: ModelConfig, weights: WeightReader) -> tuple[HcHeadWeights, Tensor]:
    collapse = HcHeadWeights(
        fn=weights.vector("hc_head_fn"),
        base=weights.vector("hc_head_base"),
        scale=weights.vector("hc_head_scale"),
        norm_eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
    )
    return collapse, weights.vector("norm.weight")
