"""The operations that only draft modules have, beside those of ``Ops``: their torch functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache
from dsv4.ops.attention.block import block_attention
from dsv4.ops.hyper_connection import HcHeadWeights, hc_collapse
from dsv4.ops.kv_write import kv_write
from dsv4.ops.markov import confidence, markov_logits
from dsv4.ops.stream_means import stream_means
from dsv4.weights.quant import Weight


class KvWrite(Protocol):
    """``dsv4.ops.kv_write.kv_write``."""

    def __call__(
        self,
        kv_TD: Tensor,
        norm_weight: Tensor,
        positions_T: Tensor,
        inv_freq: Tensor,
        ring: RowCache,
        eps: float,
    ) -> None: ...


class BlockAttention(Protocol):
    """``dsv4.ops.attention.block.block_attention``."""

    def __call__(
        self, q_THD: Tensor, keys: KeySet, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
    ) -> Tensor: ...


class StreamMeans(Protocol):
    """``dsv4.ops.stream_means.stream_means``."""

    def __call__(self, taps: Sequence[Tensor]) -> Tensor: ...


class HcCollapse(Protocol):
    """``dsv4.ops.hyper_connection.hc_collapse``."""

    def __call__(self, streams_TME: Tensor, weights: HcHeadWeights) -> Tensor: ...


class MarkovLogits(Protocol):
    """``dsv4.ops.markov.markov_logits``."""

    def __call__(self, base_V: Tensor, previous_1: Tensor, w1_VR: Tensor, w2: Weight) -> Tensor: ...


class Confidence(Protocol):
    """``dsv4.ops.markov.confidence``."""

    def __call__(self, z_E: Tensor, previous_1: Tensor, w1_VR: Tensor, proj: Weight) -> Tensor: ...


@dataclass(frozen=True)
class DraftOps:
    """Shapes and meanings are those of the torch functions of the same names."""

    kv_write: KvWrite
    block_attention: BlockAttention
    stream_means: StreamMeans
    hc_collapse: HcCollapse
    markov_logits: MarkovLogits
    confidence: Confidence


TORCH_DRAFTS = DraftOps(
    kv_write=kv_write,
    block_attention=block_attention,
    stream_means=stream_means,
    hc_collapse=hc_collapse,
    markov_logits=markov_logits,
    confidence=confidence,
)
