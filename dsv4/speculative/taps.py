"""Taps: what a draft module reads of a step of the main model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4.layers.values import ValueSink


class Taps:
    """The values that a draft module reads, kept as a step shows them; all go on to ``behind``."""

    def __init__(self, names: Sequence[str], behind: ValueSink) -> None:
        self.found: dict[str, Tensor] = {}
        self._names = names
        self._behind = behind

    def wants(self, name: str) -> bool:
        """The module's, and what else is traced."""
        return name in self._names or self._behind.wants(name)

    def value(self, name: str, tensor: Tensor, ratio: int = 1) -> None:
        """Keeps it for the module."""
        if name in self._names:
            self.found[name] = tensor
        self._behind.value(name, tensor, ratio)

    def compute(
        self,
        function: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> Tensor:
        """Only of what else is traced: the module reads results of ops."""
        return self._behind.compute(function, shape, dtype, *tensors)
