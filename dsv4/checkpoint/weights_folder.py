"""Writes weights that are in memory: a checkpoint folder, or that of a draft module alone."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint.layouts import Layout, declare
from dsv4.checkpoint.load import Weights
from dsv4.checkpoint.names import Dialect
from dsv4.checkpoint.outputs import output_tensors
from dsv4.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    WRITERS,
    OutputTensor,
    new_folder,
    write_json,
    write_shards,
)
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import MtpKind, Parameter, parameters, shown_mtp
from dsv4.weights.quant import QuantTensor


def write_weights(
    folder: str | Path,
    raw_config: dict[str, Any],
    layout: Layout,
    weights: Weights,
    *,
    names: Dialect = Dialect.NATIVE,
    mtp: MtpKind | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a checkpoint folder of ``weights``, which are in the formats of ``layout``.

    Raises ``UserError`` for an invalid config or an existing folder.
    """
    config = ModelConfig.from_dict(raw_config)
    declared = declare(raw_config, layout, names, config.num_hidden_layers)
    tensors = output_tensors(layout, names, parameters(config, mtp), InMemory(weights))
    _write(Path(folder), declared, tensors, shard_bytes)


def write_draft(
    folder: str | Path, raw_config: dict[str, Any], layout: Layout, weights: Weights
) -> None:
    """Writes the ``mtp.*`` parameters among ``weights``, which are in the formats of ``layout``,
    beside ``raw_config``, the model's ``config.json`` with the module's keys: a folder for
    ``EngineConfig.draft_weights``.

    Raises ``UserError`` for an invalid config, an existing folder and weights without a module;
    ``KeyError`` for a module that is not whole.
    """
    config = ModelConfig.from_dict(raw_config)
    shown = shown_mtp(weights)
    if shown is None:
        raise UserError("weights: found no mtp.* parameters, expected those of a draft module")
    kind, stages = shown
    declared = declare(raw_config, layout, Dialect.NATIVE, config.num_hidden_layers)
    own = {
        name: parameter
        for name, parameter in parameters(config, kind, stages).items()
        if name.startswith("mtp.")
    }
    tensors = output_tensors(layout, Dialect.NATIVE, own, InMemory(weights))
    _write(Path(folder), declared, tensors, DEFAULT_SHARD_BYTES)


class InMemory:
    """``WeightSource`` of weights that are already in the formats of the layout."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def matrix(self, parameter: Parameter, expert: int | None) -> QuantTensor:
        weight = self._weights[parameter.name]
        assert isinstance(weight, QuantTensor)
        return weight if expert is None else weight[expert]

    def plain(self, parameter: Parameter) -> Tensor:
        weight = self._weights[parameter.name]
        assert isinstance(weight, Tensor)
        return weight

    def input_scale(self, parameter: Parameter, expert: int | None) -> Tensor | None:
        return torch.tensor(1.0, dtype=torch.float32)

    def fp8_scale_dtype(self, parameter: Parameter) -> torch.dtype:
        return torch.float8_e8m0fnu


def _write(
    folder: Path,
    declared: tuple[dict[str, Any], dict[str, Any] | None],
    tensors: list[OutputTensor],
    shard_bytes: int,
) -> None:
    """``declared``: ``config.json`` and ``hf_quant_config.json``, as ``declare`` gives them."""
    config, separate = declared
    with new_folder(folder) as temporary:
        write_json(temporary / "config.json", config)
        if separate is not None:
            write_json(temporary / "hf_quant_config.json", separate)
        write_shards(temporary, tensors, shard_bytes, writers=WRITERS)
