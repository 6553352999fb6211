"""Writes a folder that holds a draft module alone, for ``EngineConfig.draft_weights``."""

from pathlib import Path
from typing import Any

from dsv4.checkpoint.layouts import Layout, declare
from dsv4.checkpoint.load import Weights
from dsv4.checkpoint.names import Dialect
from dsv4.checkpoint.outputs import output_tensors
from dsv4.checkpoint.synthetic import InMemory
from dsv4.checkpoint.writer import DEFAULT_SHARD_BYTES, new_folder, write_json, write_shards
from dsv4.config import ModelConfig
from dsv4.weights.parameters import parameters, shown_mtp


def write_draft(
    folder: str | Path, raw_config: dict[str, Any], layout: Layout, weights: Weights
) -> None:
    """Writes the ``mtp.*`` parameters among ``weights``, which are in the formats of ``layout``,
    beside ``raw_config``, the model's ``config.json`` with the module's keys.

    Raises ``UserError`` for an invalid config, an existing folder and weights without a module;
    ``KeyError`` for a module that is not whole.
    """
    config = ModelConfig.from_dict(raw_config)
    kind, stages = shown_mtp(weights) or ("classic", 1)
    declared, separate = declare(raw_config, layout, Dialect.NATIVE, config.num_hidden_layers)
    own = {
        name: parameter
        for name, parameter in parameters(config, kind, stages).items()
        if name.startswith("mtp.")
    }
    with new_folder(Path(folder)) as temporary:
        write_json(temporary / "config.json", declared)
        if separate is not None:
            write_json(temporary / "hf_quant_config.json", separate)
        tensors = output_tensors(layout, Dialect.NATIVE, own, InMemory(weights))
        write_shards(temporary, tensors, DEFAULT_SHARD_BYTES)
