"""The named values inside a step, and how its layers show them (traces.md#values)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.caches.layer import AttentionState, CompressedState
from dsv4.caches.rows import RowCache
from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.integers import ceil_div
from dsv4.layers.attention import Attended
from dsv4.layers.hyper_connection import Residual
from dsv4.ops import Ops
from dsv4.ops.indexer import ascending_entries, entry_scores
from dsv4.ops.moe import Mixture

Seen = Callable[[str, Tensor], None]
Wants = Callable[[str], bool]

SEAM = ("streams", "post", "comb", "x")
INDEXER = ("q", "weights", "keys", "scores", "entries")
# The values of a layer as they are computed, those behind the layers.
LAYER_VALUES = (
    *(f"attn_hc.{part}" for part in SEAM),
    *("attn.q", "attn.kv", "attn.compressed"),
    *(f"indexer.{part}" for part in INDEXER),
    *("attn.heads", "attn.output"),
    *(f"ffn_hc.{part}" for part in SEAM),
    *("router.experts", "router.weights", "ffn.output", "streams"),
)
OUTPUT_VALUES = ("hidden", "logits")


class ValueSink(Protocol):
    """Where a step shows its values, each inside the part that computes it."""

    def wants(self, name: str) -> bool:
        """Whether this value is traced."""
        ...

    def value(self, name: str, tensor: Tensor, ratio: int = 1) -> None:
        """Shows ``tensor``, which has a row for every ``ratio`` tokens: those that the step
        completes come first. A value that is not wanted is ignored.
        """
        ...

    def compute(
        self,
        function: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> Tensor:
        """``function(*tensors)`` of tensors with a row for each token, where a value is no result
        of an op. ``shape`` and ``dtype`` are those of its result for all tokens of the step.
        """
        ...


class Untraced:
    """The sink of a step that nobody watches."""

    def wants(self, name: str) -> bool:
        """Nothing."""
        return False

    def value(self, name: str, tensor: Tensor, ratio: int = 1) -> None:
        """Ignored."""

    def compute(
        self,
        function: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> Tensor:
        """Never asked for."""
        raise AssertionError("nothing is wanted")


UNTRACED = Untraced()


@dataclass(frozen=True)
class Watch:
    """What a traced step shows: ``seen(name, rows)`` is called on the host for every value that is
    wanted, in order, with a copy of the rows that the step completed; of ``logits`` for 8 tokens at
    a time.
    """

    seen: Seen
    wants: Wants = lambda name: True


def value_names(config: ModelConfig) -> list[str]:
    """The names of every value of a step, in the order in which they are computed."""
    names = []
    for layer, ratio in enumerate(config.compress_ratios):
        absent = () if ratio else ("attn.compressed",)
        if ratio != CSA_RATIO:
            absent += tuple(f"indexer.{part}" for part in INDEXER)
        names += [f"layers.{layer}.{value}" for value in LAYER_VALUES if value not in absent]
    return [*names, *OUTPUT_VALUES]


def show_seam(sink: ValueSink, name: str, x_TE: Tensor, residual: Residual) -> None:
    """The values of the seam ``layers.N.attn_hc`` or ``layers.N.ffn_hc``."""
    tensors = (residual.streams_TME, residual.post_TM, residual.comb_TMM, x_TE)
    for part, tensor in zip(SEAM, tensors, strict=True):
        sink.value(f"{name}.{part}", tensor)


def show_attention(
    sink: ValueSink,
    layer: int,
    attended: Attended,
    positions_T: Tensor,
    state: AttentionState,
) -> None:
    """The values of the attention of a layer, behind it."""
    name = f"layers.{layer}.attn"
    q_THD = attended.queries.q_THD
    sink.value(f"{name}.q", q_THD)
    _show_window_rows(sink, f"{name}.kv", state.keys.ring, positions_T, q_THD.dtype)
    if state.compressed is not None:
        ratio = state.keys.ratio
        rows = (state.compressed, ratio, positions_T, q_THD.dtype)
        _show_compressed_rows(sink, f"{name}.compressed", *rows)
    if attended.selection is not None:
        _show_selection(sink, f"layers.{layer}.indexer", attended, positions_T, state)
    sink.value(f"{name}.heads", attended.heads_THD)


def show_experts(sink: ValueSink, layer: int, mixture: Mixture) -> None:
    """The values of the experts of a layer."""
    sink.value(f"layers.{layer}.router.experts", mixture.ids_TP)
    sink.value(f"layers.{layer}.router.weights", mixture.weights_TP)


def show_result(sink: ValueSink, name: str, ops: Ops, y_TE: Any) -> None:
    """The result of a sublayer, in the part behind it: before, it may be on its way."""
    if sink.wants(name):
        sink.value(name, ops.summed(y_TE))


def completed_rows(position: int, tokens: int, ratio: int) -> int:
    """How many rows of a value the ``tokens`` tokens from ``position`` on complete."""
    return (position + tokens) // ratio - position // ratio


def _show_window_rows(
    sink: ValueSink, name: str, ring: RowCache, positions_T: Tensor, dtype: torch.dtype
) -> None:
    def rows(positions_T: Tensor) -> Tensor:
        return ring.read(positions_T % ring.slots).to(dtype)

    if sink.wants(name):
        shape = (positions_T.shape[0], ring.width)
        sink.value(name, sink.compute(rows, shape, dtype, positions_T))


def _show_compressed_rows(
    sink: ValueSink,
    name: str,
    state: CompressedState,
    ratio: int,
    positions_T: Tensor,
    dtype: torch.dtype,
) -> None:
    """The rows from the first one on that the step can complete; as many as it can complete."""
    cache = state.rows

    def rows(positions_T: Tensor) -> Tensor:
        count = ceil_div(positions_T.shape[0], ratio)
        entries = positions_T[0] // ratio + torch.arange(count, device=positions_T.device)
        return cache.read(entries).to(dtype)

    if sink.wants(name):
        shape = (ceil_div(positions_T.shape[0], ratio), cache.width)
        sink.value(name, sink.compute(rows, shape, dtype, positions_T), ratio)


def _show_selection(
    sink: ValueSink, name: str, attended: Attended, positions_T: Tensor, state: AttentionState
) -> None:
    """The scores are computed from the queries and keys that the kernel read."""
    index = state.index
    q_TID = attended.queries.index_TID
    selection = attended.selection
    assert index is not None
    assert q_TID is not None
    assert selection is not None
    sink.value(f"{name}.q", q_TID)
    sink.value(f"{name}.weights", selection.weight_TI)
    ratio = state.keys.ratio
    _show_compressed_rows(sink, f"{name}.keys", index, ratio, positions_T, q_TID.dtype)
    shape = tuple(selection.selected_TK.shape)

    def scores(q_TID: Tensor, weight_TI: Tensor, selected_TK: Tensor) -> Tensor:
        entries_TK = ascending_entries(selected_TK)
        return entry_scores(q_TID, weight_TI, selection.score_scale, index.rows, entries_TK)

    if sink.wants(f"{name}.scores"):
        read = (q_TID, selection.weight_TI, selection.selected_TK)
        scores_TK = sink.compute(scores, shape, torch.float32, *read)
        sink.value(f"{name}.scores", scores_TK)
    if sink.wants(f"{name}.entries"):
        selected_TK = selection.selected_TK
        entries_TK = sink.compute(ascending_entries, shape, torch.int64, selected_TK)
        sink.value(f"{name}.entries", entries_TK)
