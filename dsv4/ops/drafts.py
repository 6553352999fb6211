"""The operations that only layers of draft modules have, beside those of ``Ops``: their torch
functions. The CUDA forms are in ``dsv4.ops.draft_tables``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache
from dsv4.ops.attention.block import block_attention
from dsv4.ops.draft_rows import stream_linear, token_mixing
from dsv4.ops.kv_write import kv_write
from dsv4.ops.linear import RowList
from dsv4.ops.markov import markov_logits
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


class TokenMixing(Protocol):
    """``dsv4.ops.draft_rows.token_mixing``."""

    def __call__(self, positions_T: Tensor, streams: int) -> tuple[Tensor, Tensor]: ...


class StreamLinear(Protocol):
    """``dsv4.ops.draft_rows.stream_linear``."""

    def __call__(
        self, streams_TME: Tensor, rows: RowList, norm_weight: Tensor, norm_eps: float
    ) -> Tensor: ...


class MarkovLogits(Protocol):
    """``dsv4.ops.markov.markov_logits``."""

    def __call__(self, base_V: Tensor, previous_1: Tensor, w1_VR: Tensor, w2: Weight) -> Tensor: ...


@dataclass(frozen=True)
class DraftOps:
    """Shapes and meanings are those of the torch functions of the same names."""

    kv_write: KvWrite
    block_attention: BlockAttention
    stream_means: StreamMeans
    token_mixing: TokenMixing
    stream_linear: StreamLinear
    markov_logits: MarkovLogits


TORCH_DRAFTS = DraftOps(
    kv_write=kv_write,
    block_attention=block_attention,
    stream_means=stream_means,
    token_mixing=token_mixing,
    stream_linear=stream_linear,
    markov_logits=markov_logits,
)
