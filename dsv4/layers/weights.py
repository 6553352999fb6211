"""Typed access to loaded weights under a name prefix."""

from collections.abc import Mapping

from torch import Tensor

from dsv4.ops import Ops
from dsv4.quant import QuantTensor

Weights = Mapping[str, QuantTensor | Tensor]


class WeightReader:
    """Reads parameters by their names below ``prefix``, packing matrices into the layout of ``ops``."""

    def __init__(self, weights: Weights, ops: Ops, prefix: str = "") -> None:
        self._weights = weights
        self._ops = ops
        self._prefix = prefix

    def below(self, name: str) -> "WeightReader":
        """The reader for ``prefix + name + "."``."""
        return WeightReader(self._weights, self._ops, f"{self._prefix}{name}.")

    def matrix(self, name: str) -> QuantTensor:
        """A weight matrix in the op table's layout."""
        return self._ops.pack_weight(self.stored_matrix(name))

    def stored_matrix(self, name: str) -> QuantTensor:
        """A weight matrix as stored in the checkpoint."""
        weight = self._weights[self._prefix + name]
        assert isinstance(weight, QuantTensor), f"{self._prefix}{name} is not a matrix"
        return weight

    def tensor(self, name: str) -> Tensor:
        """A norm, bias, table or mHC parameter."""
        weight = self._weights[self._prefix + name]
        assert isinstance(weight, Tensor), f"{self._prefix}{name} is a matrix"
        return weight
