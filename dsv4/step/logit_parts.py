"""Logits of many positions, a few at a time: those of a whole chunk take gigabytes, which nobody
has planned.
"""

from collections.abc import Iterator

from torch import Tensor

from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.step.direct import DirectSteps
from dsv4.step.steps import RecordedSteps


def logits_in_parts(steps: DirectSteps | RecordedSteps, hidden_TE: Tensor) -> Iterator[Tensor]:
    """float32 ``[T, V]`` of up to 8 final hidden states after the other, each overwritten by the
    next.
    """
    for first in range(0, len(hidden_TE), MAX_DECODE_TOKENS):
        yield steps.logits(hidden_TE[first : first + MAX_DECODE_TOKENS])
