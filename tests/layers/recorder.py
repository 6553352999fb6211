"""A small model whose ops are recorded: a recording op table shows their arguments."""

import dataclasses
from typing import Any

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import Weights
from dsv4.ops import TORCH, Ops
from dsv4.weights.quant import QuantTensor
from tests.model.tiny import random_weights, raw_config

RATIOS = (0, 4, 128)
CONFIG = ModelConfig.from_dict(raw_config(RATIOS, 1))
WEIGHTS: Weights = random_weights(CONFIG)
TOKENS = 9
# Relative to the largest value. Found: 3.5e-7.
BOUND = 1e-6


@dataclasses.dataclass
class Recorder:
    """An op table that remembers the arguments and the result of every call."""

    calls: list[tuple[str, tuple[Any, ...], Any]] = dataclasses.field(default_factory=list)

    def table(self) -> Ops:
        names = [field.name for field in dataclasses.fields(Ops)]
        return Ops(**{name: self._recording(name) for name in names})

    def _recording(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            result = getattr(TORCH, name)(*arguments, **named)
            self.calls.append((name, arguments, result))
            return result

        return call

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments, _ in self.calls if called == name]

    def results(self, name: str) -> list[Any]:
        return [result for called, _, result in self.calls if called == name]


def matrix(name: str) -> Tensor:
    weight = WEIGHTS[name]
    assert isinstance(weight, QuantTensor)
    return weight.dequantize().double()


def vector(name: str) -> Tensor:
    weight = WEIGHTS[name]
    assert isinstance(weight, Tensor)
    return weight.double()
