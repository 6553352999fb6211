"""The steps of a trace hand out what the ones they run return, whatever overwrites it."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from dsv4.layers.values import Watch
from dsv4.trace.steps import TracedSteps


class SharedWorkspace:
    """Steps that keep hidden states and logits in one memory, as recorded steps do."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, 4)
        self.state = SimpleNamespace(position=1)

    def traced(self, watch: Watch) -> Callable[[Sequence[int]], Tensor]:
        """Hidden states of ones."""
        return lambda token_ids: self._memory.fill_(1.0)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Twice the hidden states, in their place."""
        return self._memory.copy_(2 * hidden_TE)


def test_logits_that_are_shown_leave_the_hidden_states_to_the_caller() -> None:
    shown = {}
    watch = Watch(shown.__setitem__, lambda name: True)
    hidden_TE = TracedSteps(cast(Any, SharedWorkspace()), watch, None).run([7])
    assert shown["logits"].tolist() == [[2.0] * 4]
    assert hidden_TE.tolist() == [[1.0] * 4]
