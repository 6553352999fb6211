"""A recorded step: its parts in order, each with its items on one device's recording."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dsv4.channels import Channels
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel
from dsv4.launch.recording import Recording
from dsv4.launch.workspace import lay_out
from dsv4.model import Outputs
from dsv4.step.kernel_names import CALL, kernel_name, kernels_of
from dsv4.step.parts import AnyPart, Part
from dsv4.step.traced_values import KeptValue

_LOG = logging.getLogger("dsv4")
_UNUSUAL = "_any_geometry"


@dataclass(frozen=True)
class RecordedStep:
    """A step of up to ``tokens`` tokens: its parts in order, and what each device does; ``head``
    computes the outputs.

    ``values``: those that stay on the device. ``token``: the sampled one, int64 scalar. A run uses
    each of ``channels`` at most ``channel_uses`` times; None: it uses none.
    """

    tokens: int
    head: torch.device
    parts: tuple[AnyPart, ...]
    recordings: Mapping[torch.device, Recording]
    outputs: Outputs
    values: Sequence[KeptValue]
    token: Tensor | None
    channels: Channels | None = None
    channel_uses: int = 0

    def turn(self, uses: int | None = None) -> AbstractContextManager[None]:
        """Around queueing a run, or parts of one that use no channel more than ``uses`` times."""
        if self.channels is None:
            return nullcontext()
        return self.channels.turn(self.channel_uses if uses is None else uses)

    def kernels(self) -> set[tuple[Kernel, str]]:
        """Every kernel of the step with its architecture; of a prefill step, those of shorter
        chunks too.
        """
        return {
            (kernel, recording.target.architecture)
            for recording in self.recordings.values()
            for kernel in kernels_of(recording.items, self.tokens)
        }

    @cached_property
    def dense_until(self) -> int:
        """See ``Recording``; every run asks for it."""
        found = (recording.dense_until for recording in self.recordings.values())
        return min(filter(None, found), default=0)

    def is_dense(self, end: int | None) -> bool:
        """Whether a run behind which the sequence has ``end`` tokens is dense; None: any number."""
        return end is not None and end <= self.dense_until

    def ends(self, max_context: int) -> list[int]:
        """The longest sequences behind its dense runs and behind the others, of at most
        ``max_context``; without those that there are none of.
        """
        return sorted({min(self.dense_until, max_context), max_context} - {0})

    def differs_if_dense(self, part: Part) -> bool:
        """Whether a dense run does something else in this part."""
        items = self.recordings[part.device].items[part.start : part.stop]
        return any(isinstance(item, Launch) and item.differs_if_dense for item in items)

    @property
    def steps_begun(self) -> int:
        """How many steps in which ranks exchange words a run of it is."""
        return self.recordings[self.head].steps_begun

    def workspace_bytes(self) -> dict[torch.device, int]:
        """Memory that the buffers of each device share."""
        return {device: lay_out(recording).nbytes for device, recording in self.recordings.items()}

    def launches(self, part: Part) -> list[str]:
        """Names of the items of a part, in order: kernels, and ``CALL`` for a function."""
        items = self.recordings[part.device].items[part.start : part.stop]
        return [item.signature.kernel if isinstance(item, Launch) else CALL for item in items]

    def launched(self, part: Part, tokens: int, dense: bool) -> list[tuple[int, str]]:
        """Index and kernel of every item of a part that runs for this many tokens, in order."""
        items = enumerate(self.recordings[part.device].items[part.start : part.stop], part.start)
        names = ((index, kernel_name(item, tokens, dense)) for index, item in items)
        return [(index, name) for index, name in names if name is not None]

    def unusual_kernels(self) -> list[str]:
        """Kernels for geometries that the fast ones do not know."""
        names = {
            name for part in self.parts if isinstance(part, Part) for name in self.launches(part)
        }
        return sorted(name for name in names if name.endswith(_UNUSUAL))


def log_unusual_kernels(steps: list[RecordedStep]) -> None:
    """Says once which kernels for unusual geometry the steps use: nothing is a silent slow path."""
    names = sorted({name for step in steps for name in step.unusual_kernels()})
    if names:
        _LOG.warning("unusual geometry: %s instead of the fast kernels", ", ".join(names))
