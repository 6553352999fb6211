"""Small checkpoint folders for the loader tests, read and changed with the safetensors library
instead of our code.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4.checkpoint import Checkpoint, Weights, load_weights, open_checkpoint
from dsv4.config import ModelConfig
from dsv4.weights.parameters import MtpKind
from dsv4.weights.quant import QuantTensor

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def read_tensors(folder: Path) -> Tensors:
    """All tensors of all shards."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def changed_copy(
    source: Path,
    target: Path,
    edit: Callable[[Tensors], Tensors | None] = lambda _: None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Copies a folder into a single-file one with other tensors and config keys; ``edit`` changes
    or replaces them.
    """
    target.mkdir()
    tensors = read_tensors(source)
    edited = edit(tensors)
    save_file(tensors if edited is None else edited, target / "model.safetensors")
    for file in source.glob("*.json"):
        if not file.name.endswith("index.json"):
            shutil.copyfile(file, target / file.name)
    if config is not None:
        raw = {**json.loads((source / "config.json").read_text()), **config}
        (target / "config.json").write_text(
            json.dumps({k: v for k, v in raw.items() if v is not None})
        )
    return target


def load(folder: Path, mtp: MtpKind | None = None) -> Weights:
    """Everything on the CPU."""
    checkpoint = open_checkpoint(folder)
    return load_weights(checkpoint, config_of(checkpoint), device_of=lambda _: CPU, mtp=mtp)


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """The ``ModelConfig`` of an opened folder."""
    return ModelConfig.from_dict(checkpoint.raw_config)


def matrix(weights: Weights, name: str) -> QuantTensor:
    """A LINEAR, EXPERT or FLOOR parameter."""
    weight = weights[name]
    assert isinstance(weight, QuantTensor)
    return weight


def as_bytes(weight: QuantTensor | Tensor | None) -> list[tuple[Any, ...]]:
    """Dtypes, shapes and bytes, to compare what NaN-aware and numeric comparisons would blur."""
    if weight is None:
        return []
    if isinstance(weight, QuantTensor):
        return [
            part
            for one in (weight.data, weight.block_scale, weight.global_scale)
            for part in as_bytes(one)
        ]
    return [
        (
            weight.dtype,
            tuple(weight.shape),
            weight.reshape(-1).view(torch.uint8).cpu().numpy().tobytes(),
        )
    ]


def same_tensors(left: Tensors, right: Tensors) -> bool:
    """Whether names, dtypes, shapes and bytes agree."""
    return left.keys() == right.keys() and all(
        as_bytes(left[name]) == as_bytes(right[name]) for name in left
    )
