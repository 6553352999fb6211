"""Experts that have native copies: w1 and w3 in one, w2 in its own."""

from dataclasses import dataclass

from dsv4.ops.moe import ExpertWeights
from dsv4.weights.native import (
    INTERLEAVED_ROWS,
    NativeGateUp,
    native_weight,
    unsupported_reason,
)
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.packed_native import native_format, with_native
from dsv4.weights.quant import QuantTensor


@dataclass(frozen=True)
class NativeExperts(ExpertWeights[PackedWeight]):
    """Packed experts; ``gate_up`` and ``w2`` (a ``PackedWithNative``) have native copies, or
    neither: then ``unsupported`` says why in one clause.
    """

    gate_up: NativeGateUp | None
    unsupported: str | None


def pack_native_experts(
    w1: QuantTensor, w2: QuantTensor, w3: QuantTensor, nvfp4: bool
) -> NativeExperts:
    """Packs experts and makes their native copies where all three matrices have one of one format.

    ``nvfp4`` as in ``native_format``.
    """
    reason = _unsupported(w1, w2, w3, nvfp4)
    gate_up = None
    down = None
    if reason is None:
        format = native_format(w1.format, nvfp4)
        gate_up = NativeGateUp.of(native_weight(w1, format), native_weight(w3, format))
        down = native_weight(w2, format)
    packed_w2 = with_native(pack_weight(w2), down, reason)
    return NativeExperts(pack_weight(w1), packed_w2, pack_weight(w3), gate_up, reason)


def _unsupported(w1: QuantTensor, w2: QuantTensor, w3: QuantTensor, nvfp4: bool) -> str | None:
    for name, weight in (("w1", w1), ("w2", w2), ("w3", w3)):
        reason = unsupported_reason(weight, native_format(weight.format, nvfp4))
        if reason is not None:
            return f"{name}: {reason}"
        if weight.format is not w1.format:
            return f"{name}: {weight.format.value} beside {w1.format.value} of w1"
    if w1.shape[-2] % INTERLEAVED_ROWS:
        return f"w1: {w1.shape[-2]} rows are no multiple of {INTERLEAVED_ROWS}"
    return None
