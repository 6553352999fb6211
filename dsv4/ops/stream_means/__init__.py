"""What DSpark reads of the main model: the mean of the streams behind some layers
(model.md#dspark).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def stream_means(taps: Sequence[Tensor]) -> Tensor:
    """mean_k x_k of the streams ``[T, M, E]`` of every tap, side by side: ``[T, taps · E]``.

    The sums are float32, with one rounding to the dtype of the streams.
    """
    means = [streams_TME.float().mean(1).to(streams_TME.dtype) for streams_TME in taps]
    return torch.cat(means, dim=1)
