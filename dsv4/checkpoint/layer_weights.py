"""One layer's weights at a time, of a checkpoint or drawn at random: what validation reads of
models that do not fit.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Generator, Tensor

from dsv4.checkpoint.index import open_checkpoint
from dsv4.checkpoint.layouts import Layout, check_layout, format_in
from dsv4.checkpoint.load import load_found
from dsv4.checkpoint.matrices import load_matrix
from dsv4.checkpoint.stored_parameters import StoredParameter, find_parameters
from dsv4.checkpoint.synthetic import random_parameter
from dsv4.config import ModelConfig
from dsv4.weights.on_demand import WeightOnDemand
from dsv4.weights.parameters import Parameter, Role, layer_of, parameters
from dsv4.weights.quant import QuantTensor, packed_bytes

LayerWeights = dict[str, QuantTensor | WeightOnDemand | Tensor]


class LayerSource(Protocol):
    """Where layers come from. ``raw_config``: the values of ``config.json``."""

    @property
    def raw_config(self) -> dict[str, Any]: ...

    @property
    def config(self) -> ModelConfig: ...

    def weights(self, layer: int, device: torch.device, on_demand: bool) -> LayerWeights:
        """The layer's parameters by canonical name, as stored, on ``device``. ``on_demand``: its
        routed experts are read one at a time, when they are used.
        """
        ...

    def embedding(self, token_ids: Sequence[int]) -> Tensor:
        """Rows of the embedding table ``[T, E]`` on the CPU, as stored."""
        ...


class StoredLayers:
    """Layers of a checkpoint folder, read from its files. Raises ``UserError`` like
    ``load_weights``.
    """

    def __init__(self, folder: str | Path) -> None:
        self._checkpoint = open_checkpoint(folder)
        self.raw_config = self._checkpoint.raw_config
        self.config = self._checkpoint.model_config()
        self._by_layer: defaultdict[int | None, list[StoredParameter]] = defaultdict(list)
        for stored in find_parameters(self._checkpoint, self.config):
            self._by_layer[layer_of(stored.parameter.name)].append(stored)

    def weights(self, layer: int, device: torch.device, on_demand: bool) -> LayerWeights:
        """See ``LayerSource``."""
        left: list[StoredParameter] = []
        loaded: list[StoredParameter] = []
        for stored in self._by_layer[layer]:
            is_left = on_demand and stored.parameter.role is Role.EXPERT
            (left if is_left else loaded).append(stored)
        weights: LayerWeights = {
            **load_found(self._checkpoint, self.config, loaded, lambda _: device)
        }
        for stored in left:
            shape = stored.parameter.shape
            read = partial(load_matrix, self._checkpoint, stored, device)
            weights[stored.parameter.name] = WeightOnDemand(shape, stored.nbytes, read)
        return weights

    def embedding(self, token_ids: Sequence[int]) -> Tensor:
        """See ``LayerSource``."""
        (table,) = (
            stored for stored in self._by_layer[None] if stored.parameter.name == "embed.weight"
        )
        (name,) = table.parts["data"].names
        return self._checkpoint.read(name)[torch.tensor(token_ids, dtype=torch.int64)]


class RandomLayers:
    """Random layers of a geometry. Every expert is drawn from a seed of its own, so that one can be
    drawn without the others, and always on ``drawn_on``: equal arguments give equal bytes whatever
    device asks for them.
    """

    def __init__(
        self, raw_config: dict[str, Any], layout: Layout, seed: int, drawn_on: torch.device
    ) -> None:
        check_layout(layout)
        self.raw_config = raw_config
        self.config = ModelConfig.from_dict(raw_config)
        self._layout: Layout = layout
        self._seed = seed
        self._drawn_on = drawn_on
        self._parameters = parameters(self.config)

    def weights(self, layer: int, device: torch.device, on_demand: bool) -> LayerWeights:
        """See ``LayerSource``."""
        weights: LayerWeights = {}
        for name, parameter in self._parameters.items():
            if layer_of(name) != layer:
                continue
            if parameter.role is not Role.EXPERT:
                weights[name] = self._draw(parameter, None).to(device)
            elif on_demand:
                weights[name] = self._expert_on_demand(parameter, device)
            else:
                experts = range(parameter.shape[0])
                weights[name] = _stack(
                    [self._expert(parameter, device, expert) for expert in experts]
                )
        return weights

    def embedding(self, token_ids: Sequence[int]) -> Tensor:
        """See ``LayerSource``. A token's row has a seed of its own too."""
        table = self._parameters["embed.weight"]
        row = replace(table, shape=(1, table.shape[1]))
        rows = (self._draw(row, token) for token in token_ids)
        return torch.cat([drawn.data for drawn in rows if isinstance(drawn, QuantTensor)]).cpu()

    def _expert_on_demand(self, parameter: Parameter, device: torch.device) -> WeightOnDemand:
        format = format_in(self._layout, parameter)
        assert format is not None
        nbytes = packed_bytes(format, parameter.shape)
        return WeightOnDemand(parameter.shape, nbytes, partial(self._expert, parameter, device))

    def _expert(
        self, parameter: Parameter, device: torch.device, expert: int | None
    ) -> QuantTensor:
        assert expert is not None, "experts are drawn one at a time"
        drawn = self._draw(replace(parameter, shape=parameter.shape[1:]), expert)
        assert isinstance(drawn, QuantTensor)
        return drawn.to(device)

    def _draw(self, parameter: Parameter, index: int | None) -> QuantTensor | Tensor:
        seed = crc32(f"{self._seed} {parameter.name} {index}".encode())
        generator = Generator(self._drawn_on).manual_seed(seed)
        return random_parameter(parameter, self.config, self._layout, generator)


def _stack(matrices: Sequence[QuantTensor]) -> QuantTensor:
    """One weight ``[X, N, K]`` of X matrices of one format."""
    first = matrices[0]

    def stacked(parts: list[Tensor | None]) -> Tensor | None:
        present = [part.view(torch.uint8) for part in parts if part is not None]
        if not present:
            return None
        dtype = next(part.dtype for part in parts if part is not None)
        return torch.stack(present).view(dtype)

    data = stacked([matrix.data for matrix in matrices])
    assert data is not None
    block = stacked([matrix.block_scale for matrix in matrices])
    totals = [matrix.global_scale for matrix in matrices if matrix.global_scale is not None]
    return QuantTensor(
        data,
        block,
        torch.stack(totals) if totals else None,
        first.format,
        (len(matrices), *first.shape),
    )
