"""Typed access to loaded weights under a name prefix."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsv4.errors import UserError
from dsv4.ops import Packing
from dsv4.ops.linear import RowList
from dsv4.ops.moe import ExpertWeights
from dsv4.progress import Progress
from dsv4.weights.on_demand import WeightOnDemand
from dsv4.weights.quant import QuantTensor, ValuesLost, Weight

Weights = Mapping[str, QuantTensor | WeightOnDemand | Tensor]
AnyPacked = TypeVar("AnyPacked")
AnyParameter = TypeVar("AnyParameter", bound=QuantTensor | WeightOnDemand | Tensor)


class ReadOnce(Mapping[str, AnyParameter]):
    """Weights that are let go as they are read: a stored matrix lives only until its packed form
    exists. ``progress(done, total)`` is told about the bytes that are read, ``wait`` is called
    before with the name of each: it returns when the weight is filled. ``packed``: what was packed
    before, by the name of the first weight that it was made of, which is taken in the place of
    these weights; what is packed now is added to it.
    """

    def __init__(
        self,
        weights: dict[str, AnyParameter],
        progress: Progress | None = None,
        wait: Callable[[str], None] = lambda _: None,
        packed: dict[str, Any] | None = None,
    ) -> None:
        self._weights = weights
        self.packed = packed
        self._wait = wait
        self._progress = progress
        self._done = 0
        self._total = sum(weight.nbytes for weight in weights.values())

    def __getitem__(self, name: str) -> AnyParameter:
        weight = self._weights.pop(name)
        self._wait(name)
        self._done += weight.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class WeightReader:
    """Reads parameters by their names below ``prefix``, matrices in the layout of ``packing``.
    Raises ``UserError`` with the names of matrices whose values the layout cannot hold.
    """

    def __init__(self, weights: Weights, packing: Packing, prefix: str = "") -> None:
        self._weights = weights
        self._packing = packing
        self._prefix = prefix

    def below(self, name: str) -> "WeightReader":
        """The reader for ``prefix + name + "."``."""
        return WeightReader(self._weights, self._packing, f"{self._prefix}{name}.")

    def matrix(self, name: str) -> Weight:
        """A weight matrix in the op table's layout; one that is read on demand as it is, which the
        torch ops alone accept.
        """

        def pack() -> Weight:
            weight = self._weights[self._prefix + name]
            if isinstance(weight, WeightOnDemand):
                return weight
            assert isinstance(weight, QuantTensor), f"{self._prefix}{name} is not a matrix"
            return self._packing.pack_weight(weight)

        return self._kept([name], pack)

    def stored_matrix(self, name: str) -> QuantTensor:
        """A weight matrix as stored in the checkpoint."""
        weight = self._weights[self._prefix + name]
        assert isinstance(weight, QuantTensor), f"{self._prefix}{name} is not a matrix"
        return weight

    def experts(self, name: str) -> ExpertWeights:
        """The matrices of experts below ``name`` in the op table's layout."""
        names = [f"{name}.{part}.weight" for part in ("w1", "w2", "w3")]
        pack = self._packing.pack_experts
        if pack is None:
            return ExpertWeights(*map(self.matrix, names))
        return self._kept(names, lambda: pack(*map(self.stored_matrix, names)))

    def row_list(self, names: Sequence[str], out_dtypes: Sequence[torch.dtype | None]) -> RowList:
        """Several weight matrices of one input width in the op table's layout."""
        pack = self._packing.pack_rows
        return self._kept(
            names, lambda: pack([self.stored_matrix(name) for name in names], out_dtypes)
        )

    def _kept(self, names: Sequence[str], pack: Callable[[], AnyPacked]) -> AnyPacked:
        """What ``pack`` makes of these matrices, or made of them before."""
        packed = self._weights.packed if isinstance(self._weights, ReadOnce) else None
        if packed is None:
            return self._named(names, pack)
        name = self._prefix + names[0]
        if name not in packed:
            packed[name] = self._named(names, pack)
        return packed[name]

    def _named(self, names: Sequence[str], pack: Callable[[], AnyPacked]) -> AnyPacked:
        try:
            return pack()
        except ValuesLost as error:
            shown = ", ".join(self._prefix + name for name in names)
            advice = "EngineConfig.ops='torch' takes any"
            raise UserError(f"{shown}: {error}; {advice}") from None

    def vector(self, name: str) -> Tensor:
        """A norm, bias, sink or mHC parameter in float32."""
        return self.tensor(name).float().contiguous()

    def tensor(self, name: str) -> Tensor:
        """A parameter that is not a matrix, as stored."""
        weight = self._weights[self._prefix + name]
        assert isinstance(weight, Tensor), f"{self._prefix}{name} is a matrix"
        return weight
