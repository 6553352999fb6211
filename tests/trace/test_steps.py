"""The steps of a trace hand out what the ones they run return, whatever overwrites it, and ask for
no more logits at once than the plan counts.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from dsv4.layers.values import Watch
from dsv4.trace.steps import ShownValues, TracedSteps


class CountedLogits:
    """Hidden states of 19 tokens, and logits of no more than 8 of them in one memory."""

    def __init__(self) -> None:
        self.hidden_TE = torch.arange(19.0)[:, None]
        self.asked: list[int] = []
        self.state = SimpleNamespace(position=19)
        self._memory = torch.zeros(8, 1)

    def traced(self, watch: Watch) -> Callable[[Sequence[int]], Tensor]:
        """All of them at once."""
        return lambda token_ids: self.hidden_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Twice the hidden states."""
        self.asked.append(len(hidden_TE))
        return self._memory[: len(hidden_TE)].copy_(2 * hidden_TE)


def test_logits_of_a_chunk_are_shown_a_few_at_a_time() -> None:
    """Those of 16,384 tokens take 8.5 GB, which no plan counts."""
    steps = CountedLogits()
    shown = ShownValues()
    TracedSteps(cast(Any, steps), Watch(shown.add), None).run(list(range(19)))
    assert steps.asked == [8, 8, 3]
    assert torch.equal(shown.joined()["logits"], 2 * steps.hidden_TE)
