"""The Markov head on the GPU: the row of the token before, its product, and the sum."""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.linear.decode import linear
from dsv4.weights.quant import Weight

_SOURCE = "markov/markov"
_THREADS = 256


def markov_logits(
    recording: Recording, base_V: Tensor, previous_1: Tensor, w1_VR: Tensor, w2: Weight
) -> Tensor:
    """``dsv4.ops.markov.markov_logits``; rows of a float32 table are rounded to bfloat16.

    ``previous_1`` may be ``NAN_TOKEN``, which counts as 0.
    """
    vocabulary, rank = w1_VR.shape
    expect("base_V", base_V, torch.float32, (vocabulary,))
    expect("previous_1", previous_1, torch.int64, (1,))
    if w1_VR.dtype not in (torch.bfloat16, torch.float32) or not w1_VR.is_contiguous():
        expected = "torch.bfloat16 or torch.float32 without gaps"
        raise ValueError(f"w1_VR: found {w1_VR.dtype}, expected {expected}")
    if w2.shape != (vocabulary, rank):
        # Where it has fewer rows, the sum would read behind the product.
        raise ValueError(f"w2: found {list(w2.shape)}, expected {[vocabulary, rank]} as w1_VR")
    defines: Defines = (("FLOAT_TABLE", int(w1_VR.dtype == torch.float32)),)
    row_1R = recording.empty((1, rank), torch.bfloat16)
    recording.launch(
        Shape(Kernel(_SOURCE, "markov_row", defines), 1, _THREADS),
        table=w1_VR,
        previous=previous_1,
        row=row_1R,
        width=rank,
    )
    product_1V = linear(recording, row_1R, w2, torch.float32)
    logits_V = recording.empty((vocabulary,), torch.float32)
    recording.launch(
        Shape(Kernel(_SOURCE, "markov_add", defines), ceil_div(vocabulary, _THREADS), _THREADS),
        base=base_V,
        product=product_1V,
        out=logits_V,
        count=vocabulary,
    )
    return logits_V
