"""The logits of a decode step whose head is shared by devices
(docs/decode.md#the-head-on-all-devices).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.layers.head import HeadShare
from dsv4.ops.shared_head.cuda import fetch, logit_columns

if TYPE_CHECKING:
    from dsv4.step.recorded import StepRecorder


def record_shares(
    recorder: "StepRecorder",
    state: DecodeState,
    shares: Sequence[HeadShare],
    hidden_TE: Tensor,
) -> Tensor:
    """float32 logits ``[T, V]`` in the memory of the state, on the last device.

    The other devices wait for its hidden states, and it for their logits, behind its own. A later
    step writes neither before this one has read them: the last device does so behind its waits.
    """
    memory = state.head
    assert memory is not None, "devices that share a head have memory for it"
    *others, last = shares
    tokens = hidden_TE.shape[0]
    logits_TV = memory.logits_TV[:tokens]
    recorder.recording(last.device).place(hidden_TE, memory.hidden_TE)
    for share in others:
        recorder.wait(last.device, share.device)
    for share in others:
        with recorder.part("head", share.device):
            recording = recorder.recording(share.device)
            fetched_TE = fetch(recording, memory.hidden_TE[:tokens])
            logit_columns(recording, fetched_TE, share.rows, logits_TV, share.first)
    with recorder.part("head", last.device):
        recording = recorder.recording(last.device)
        logit_columns(recording, hidden_TE, last.rows, logits_TV, last.first)
    for share in others:
        recorder.wait(share.device, last.device)
    return logits_TV
