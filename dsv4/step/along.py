"""What is recorded along with every step of a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dsv4.launch.target import Target
from dsv4.layers.values import ValueSink
from dsv4.sampling import SamplerState

if TYPE_CHECKING:
    from dsv4.step.recorded import RecordedStep
    from dsv4.step.recorder import StepRecorder


Targets = Mapping[torch.device, Target]


class Along(Protocol):
    """What is recorded along with every step of the model: a draft module."""

    @property
    def inputs(self) -> Mapping[torch.device, Tensor]:
        """Where the token ids of every step of up to 8 tokens are, int64 ``[8]`` on each device."""
        ...

    def listen(self, behind: ValueSink) -> ValueSink:
        """What a step shows its values, which go on to ``behind``."""
        ...

    def record(self, recorder: "StepRecorder", values: ValueSink) -> None:
        """Adds parts behind the model; ``values``: of ``listen``."""
        ...

    def record_choice(
        self,
        recorder: "StepRecorder",
        logits_TV: Tensor,
        token: Tensor | None,
        sampler: SamplerState,
    ) -> None:
        """Adds parts behind the choice of ``token``, which steps of one token make."""
        ...

    def own_steps(self, targets: Targets, sampler: SamplerState) -> list["RecordedStep"]:
        """Further steps, on the head's device and with what others do for it."""
        ...

    def steps_apart(self, target: Target) -> list["RecordedStep"]:
        """Further steps there that run inside others, in memory of their own."""
        ...
