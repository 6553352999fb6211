"""The values of a recorded step: copied to the host as they are computed, or kept on the device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.launch.recording import Recording
from dsv4.layers.values import Seen, Wants, completed_rows


class KeptValue(NamedTuple):
    """A value of a step on ``device``: ``tensor`` has a row for every ``ratio`` tokens."""

    name: str
    device: torch.device
    tensor: Tensor
    ratio: int


class TracedValues:
    """The ``ValueSink`` of a recorded step."""

    def __init__(self, wants: Wants, state: DecodeState, seen: Seen | None = None) -> None:
        """``seen`` gets the values on the host as a run computes them, which no capture allows.
        None: each has memory of its own until the next run (``kept``).
        """
        self.kept: list[KeptValue] = []
        self._wants = wants
        self._state = state
        self._seen = seen
        self._recording: Recording | None = None

    @property
    def keeps(self) -> bool:
        """Whether the values stay on the device."""
        return self._seen is None

    def open(self, recording: Recording) -> None:
        """The next values are computed by ``recording``."""
        self._recording = recording

    def wants(self, name: str) -> bool:
        """As it was constructed."""
        return self._wants(name)

    def value(self, name: str, tensor: Tensor, ratio: int = 1) -> None:
        """Keeps it, or notes its copy to the host."""
        if not self.wants(name):
            return
        assert self._recording is not None, "a value belongs to a part"
        if self._seen is None:
            device = self._recording.target.device
            self.kept.append(KeptValue(name, device, self._recording.keep(tensor), ratio))
            return
        seen = self._seen

        def copy(tokens: int, value: Tensor) -> None:
            rows = completed_rows(self._state.position - tokens, tokens, ratio)
            seen(name, value[:rows].cpu())

        self._recording.call(copy, tensor)

    def compute(
        self,
        function: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> Tensor:
        """A call of the recording, of the rows of the tokens that it runs for."""
        assert self._recording is not None, "a value belongs to a part"
        result = self._recording.empty(shape, dtype)

        def store(tokens: int, result: Tensor, *tensors: Tensor) -> None:
            found = function(*(tensor[:tokens] for tensor in tensors))
            result[: found.shape[0]].copy_(found)

        self._recording.call(store, result, *tensors)
        return result
