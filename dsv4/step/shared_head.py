"""The logits of a decode step whose head is shared by devices
(docs/decode.md#the-head-on-all-devices).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.ops import Ops
from dsv4.ops.linear.decode import linear, linear_columns
from dsv4.weights.quant import Weight
from dsv4.weights.shared_rows import RowShare, shares_of

if TYPE_CHECKING:
    from dsv4.step.recorder import StepRecorder


def sharing_head(recorder: "StepRecorder", ops: Ops) -> Ops:
    """``ops`` that have devices multiply their shares of a head, where the step has computed the
    hidden states itself: at most 8 of them.
    """
    if not recorder.has_channels:
        return ops

    def vocab_parallel_linear(hidden_TE: Tensor, weight: Weight) -> Any:
        shares = shares_of(weight)
        if shares and recorder.recording(shares[-1].device).owns(hidden_TE):
            return record_shares(recorder, shares, hidden_TE, weight.shape[0])
        return ops.vocab_parallel_linear(hidden_TE, weight)

    return replace(ops, vocab_parallel_linear=vocab_parallel_linear)


def record_shares(
    recorder: "StepRecorder", shares: Sequence[RowShare], hidden_TE: Tensor, width: int
) -> Tensor:
    """float32 logits ``[T, V]`` on the last device, whose part is the open one: it sends its hidden
    states to the others, which send back their columns.
    """
    *others, last = shares
    recording = recorder.recording(last.device)
    logits_TV = recording.empty((hidden_TE.shape[0], width), torch.float32)
    for share in others:
        recorder.send(hidden_TE, last.device, share.device)
    linear_columns(recording, hidden_TE, last.rows, logits_TV, last.first)
    for share in others:
        with recorder.part("head", share.device):
            own = recorder.recording(share.device)
            received_TE = recorder.receive(hidden_TE, last.device, share.device)
            columns_TN = linear(own, received_TE, share.rows, torch.float32)
            recorder.send(columns_TN, share.device, last.device)
    for share in others:
        stop = share.first + share.rows.shape[0]
        recorder.receive_columns(logits_TV[:, share.first : stop], share.device, last.device)
    return logits_TV
