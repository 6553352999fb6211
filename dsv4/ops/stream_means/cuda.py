"""Means of streams on the GPU: a launch for every tap."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording

_THREADS = 256


def stream_means(recording: Recording, taps: Sequence[Tensor]) -> Tensor:
    """``dsv4.ops.stream_means.stream_means`` of bfloat16; ``ValueError`` for others."""
    tokens, streams, width = taps[0].shape
    row = len(taps) * width
    kernel = Kernel("stream_means/stream_means", "stream_means")
    means_TK = recording.empty((tokens, row), torch.bfloat16)
    for index, streams_TME in enumerate(taps):
        expect("taps", streams_TME, torch.bfloat16, (tokens, streams, width))
        recording.launch(
            lambda count: Shape(kernel, (ceil_div(width, _THREADS), count), _THREADS),
            taps=streams_TME,
            means=means_TK[:, index * width :],
            streams=streams,
            width=width,
            row=row,
        )
    return means_TK
