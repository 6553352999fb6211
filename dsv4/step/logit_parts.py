"""Logits of many positions, a few at a time: those of a whole chunk take gigabytes, which nobody
has planned.
"""

from collections.abc import Iterator

from torch import Tensor

from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.step.direct import DirectSteps
from dsv4.step.steps import RecordedSteps


def logits_in_parts(steps: DirectSteps | RecordedSteps, hidden_TE: Tensor) -> Iterator[Tensor]:
    """float32 ``[≤ 8, V]`` of final hidden states, in their order; each is overwritten by the next.

    ``hidden_TE``: a copy, because logits are a step, which overwrites what the one before returned.
    """
    for rows_TE in hidden_TE.split(MAX_DECODE_TOKENS):
        yield steps.logits(rows_TE)
