"""What devices do that share the rows of the head in a decode step
(docs/decode.md#the-head-on-all-devices).
"""

from torch import Tensor

from dsv4.ops.linear import linear
from dsv4.weights.quant import Weight


def fetch(rows: Tensor) -> Tensor:
    """The same rows in the memory of the device that asks for them."""
    return rows.clone()


def logit_columns(hidden_TE: Tensor, weight: Weight, logits_TV: Tensor, first: int) -> None:
    """Columns of float32 ``logits_TV`` from ``first`` on: hidden · Wᵀ of the rows in ``weight``.

    The hidden states are in the compute dtype; the logits may be memory of another device.
    """
    part_TV = linear(hidden_TE, weight, logits_TV.dtype)
    logits_TV[:, first : first + part_TV.shape[1]] = part_TV
