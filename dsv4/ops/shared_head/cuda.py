"""The shared head on GPUs: a device fetches the hidden states from the one that has them, and
stores its logits there.
"""

import torch
from torch import Tensor

from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape, ceil_div
from dsv4.launch.recording import Recording
from dsv4.ops.linear.decode import linear_columns
from dsv4.weights.quant import Weight

_THREADS = 256
_WORD_BYTES = 16


def fetch(recording: Recording, rows: Tensor) -> Tensor:
    """``dsv4.ops.shared_head.fetch`` of contiguous rows, of a multiple of 16 bytes, in memory that
    the recording's device can read.

    Raises ``ValueError`` for other rows.
    """
    expect("rows", rows, rows.dtype, tuple(rows.shape))
    if rows.nbytes % _WORD_BYTES or not is_aligned(rows, _WORD_BYTES):
        raise ValueError(
            f"rows: found {rows.nbytes} bytes, expected a multiple of {_WORD_BYTES} at a multiple "
            f"of {_WORD_BYTES}"
        )
    fetched = recording.empty_like(rows)
    count = rows.nbytes // _WORD_BYTES
    shape = Shape(Kernel("shared_head/fetch", "fetch"), ceil_div(count, _THREADS), _THREADS)
    recording.reach(rows)
    recording.launch(shape, rows=rows, fetched=fetched, count=count)
    return fetched


def logit_columns(
    recording: Recording, hidden_TE: Tensor, weight: Weight, logits_TV: Tensor, first: int
) -> None:
    """``dsv4.ops.shared_head.logit_columns`` of 1 to 8 tokens, into memory that the recording's
    device can write. ``first`` and the width are multiples of 16.
    """
    expect("logits_TV", logits_TV, torch.float32, (hidden_TE.shape[0], logits_TV.shape[1]))
    recording.reach(logits_TV)
    linear_columns(recording, hidden_TE, weight, logits_TV, first)
