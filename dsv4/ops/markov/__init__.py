"""The heads of DSpark that know the token before a draft (model.md#dspark)."""

import torch
from torch import Tensor

from dsv4.ops.linear import linear
from dsv4.weights.quant import Weight


def markov_logits(base_V: Tensor, previous_1: Tensor, w1_VR: Tensor, w2: Weight) -> Tensor:
    """base + w2 · w1[previous]: the logits of a draft behind the token int64 ``previous`` ``[1]``.

    ``base_V`` and the result are float32 ``[V]``, w1 is a table ``[V, R]`` of 16 or 32 bit, w2
    ``[V, R]``. The product is a float32 one.
    """
    return base_V + linear(w1_VR[previous_1].float(), w2)[0]


def confidence(z_E: Tensor, previous_1: Tensor, w1_VR: Tensor, proj: Weight) -> Tensor:
    """proj · [z, w1[previous]], a float32 scalar: the sigmoid of it estimates how likely a draft is
    to be accepted if those before it are.

    ``z_E`` are the collapsed streams of the draft, before the norm; proj ``[1, E + R]``.
    """
    row_1R = w1_VR[previous_1].float()
    joined_1K = torch.cat((z_E.float()[None], row_1R), dim=1)
    return linear(joined_1K, proj)[0, 0]
