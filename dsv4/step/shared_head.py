"""The logits of a decode step whose head is shared by devices
(docs/decode.md#the-head-on-all-devices).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsv4.caches.state import HeadMemory
from dsv4.ops import Ops
from dsv4.ops.shared_head.cuda import fetch, logit_columns
from dsv4.weights.quant import Weight
from dsv4.weights.shared_rows import RowShare, shares_of

if TYPE_CHECKING:
    from dsv4.step.recorder import StepRecorder


def sharing_head(recorder: "StepRecorder", memory: HeadMemory | None, ops: Ops) -> Ops:
    """``ops`` that have devices multiply their shares of a head, where the step has computed the
    hidden states itself: at most 8 of them.
    """
    if memory is None:
        return ops

    def vocab_parallel_linear(hidden_TE: Tensor, weight: Weight) -> Any:
        shares = shares_of(weight)
        if shares and recorder.recording(shares[-1].device).owns(hidden_TE):
            return record_shares(recorder, memory, shares, hidden_TE)
        return ops.vocab_parallel_linear(hidden_TE, weight)

    return replace(ops, vocab_parallel_linear=vocab_parallel_linear)


def record_shares(
    recorder: "StepRecorder",
    memory: HeadMemory,
    shares: Sequence[RowShare],
    hidden_TE: Tensor,
) -> Tensor:
    """float32 logits ``[T, V]`` in ``memory``, on the last device, whose part is the open one.

    The other devices wait for its hidden states, and it for their logits, behind its own. What
    writes either anew does so behind these waits.
    """
    *others, last = shares
    tokens = hidden_TE.shape[0]
    logits_TV = memory.logits_TV[:tokens]
    recording = recorder.recording(last.device)
    recording.place(hidden_TE, memory.hidden_TE)
    for share in others:
        recorder.wait(last.device, share.device)
    for share in others:
        with recorder.part("head", share.device):
            other = recorder.recording(share.device)
            fetched_TE = fetch(other, memory.hidden_TE[:tokens])
            logit_columns(other, fetched_TE, share.rows, logits_TV, share.first)
    logit_columns(recording, hidden_TE, last.rows, logits_TV, last.first)
    for share in others:
        recorder.wait(share.device, last.device)
    return logits_TV
