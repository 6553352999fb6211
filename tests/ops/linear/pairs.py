"""o_a and o_b as an op: a grouped product, and the product of all that it gives."""

from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.linear import decode
from dsv4.weights.quant import Weight


def output_projection(
    recording: Recording, o_TGK: Tensor, wo_a: Weight, wo_b: Weight
) -> tuple[Tensor, Tensor]:
    """What the groups give ``[T, G, R]``, and the product of that ``[T, N]``."""
    low_TGR = decode.grouped_linear(recording, o_TGK, wo_a)
    return low_TGR, decode.linear(recording, low_TGR.flatten(1), wo_b)


def in_two_launches(
    recording: Recording, o_TGK: Tensor, wo_a: Weight, wo_b: Weight
) -> tuple[Tensor, Tensor]:
    """The same with an item of torch between the two, so that they stay apart."""
    low_TGR = decode.grouped_linear(recording, o_TGK, wo_a)
    recording.call(lambda tokens, *tensors: None)
    return low_TGR, decode.linear(recording, low_TGR.flatten(1), wo_b)
