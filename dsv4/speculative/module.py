"""The draft module of a model: built from its weights, and the caches that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dsv4.caches.allocation import COMPUTE_DTYPES, kv_row_format
from dsv4.caches.draft import DraftState
from dsv4.config import DSpark as DSparkKeys
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.layers.classic_mtp import ClassicMTP
from dsv4.layers.dspark import DSpark
from dsv4.layers.weights import WeightReader, Weights
from dsv4.limits import MAX_DECODE_TOKENS, MAX_DRAFTS
from dsv4.model import Transformer
from dsv4.ops.tables import Table
from dsv4.weights.parameters import MtpKind, parameters

DraftModule = ClassicMTP | DSpark


class DraftScope(NamedTuple):
    """What a module reads and makes: ``layers`` of the main model whose streams it reads;
    ``trained_block``: how many drafts it was trained to make; ``most``: how many it can.
    """

    layers: tuple[int, ...]
    trained_block: int
    most: int

    @classmethod
    def of(cls, module: DraftModule, last_layer: int) -> "DraftScope":
        """``last_layer``: of the main model."""
        return cls._of_keys(None if isinstance(module, ClassicMTP) else module.keys, last_layer)

    @classmethod
    def planned(cls, config: ModelConfig, kind: MtpKind) -> "DraftScope":
        """The same before there is a module."""
        keys = config.dspark if kind == "dspark" else None
        return cls._of_keys(keys, config.num_hidden_layers - 1)

    @classmethod
    def _of_keys(cls, keys: DSparkKeys | None, last_layer: int) -> "DraftScope":
        if keys is None:
            return cls((last_layer,), 1, MAX_DRAFTS)
        return cls(keys.target_layer_ids, keys.block_size, min(keys.block_size, MAX_DRAFTS))

    @property
    def taps(self) -> tuple[str, ...]:
        """The values of a main step (traces.md#values) that it reads."""
        return tuple(f"layers.{layer}.streams" for layer in self.layers)


def far_layer(read: Sequence[int], devices: Mapping[int, torch.device]) -> int | None:
    """Of the layers that are ``read`` one that is not on the device of the head, which is that of
    the last layer: a module cannot read it. None where all are; ``devices`` by layer.
    """
    head = devices[max(devices)]
    return next((layer for layer in read if devices[layer] != head), None)


def build_draft(
    config: ModelConfig,
    weights: Weights,
    table: Table,
    shown: tuple[MtpKind, int],
    model: Transformer,
) -> DraftModule:
    """The module that the names of ``weights`` show: its kind and its number of blocks.

    With several devices it has a copy of the embedding on that of the head. Raises ``UserError``
    for a parameter that is not among ``weights``.
    """
    kind, stages = shown
    _check_filled(config, set(weights), kind, stages)
    root = WeightReader(weights, table.packing, "mtp.")
    dtype = model.embed.compute_dtype
    embed = model.embed
    if len(model.segments) > 1 and not embed.table_VE.is_meta:
        embed = replace(embed, table_VE=embed.table_VE.to(model.head_device))
    if kind == "classic":
        return ClassicMTP.build(config, root.below("0"), embed, model.head, dtype)
    return DSpark.build(config, root, stages, embed, model.head, dtype)


def allocate_draft(
    config: ModelConfig,
    engine: EngineConfig,
    shown: tuple[MtpKind, int],
    device: torch.device,
    checkpoint: str = "",
) -> DraftState:
    """The caches of such a module on ``device``; ``checkpoint``: whose weights it has
    (``dsv4.checkpoint.identity``).
    """
    kind, stages = shown
    module = f"{kind} in {engine.compute_dtype} of {checkpoint}"
    dtype = COMPUTE_DTYPES[engine.compute_dtype]
    rows = kv_row_format(engine)
    return DraftState.allocate(config, stages, rows, dtype, device, kind == "classic", module)


def check_keys(config: ModelConfig, source: str = "") -> None:
    """Raises ``UserError`` without dspark keys, and for those of another model; ``source``: what
    their file is called.
    """
    keys = config.dspark
    if keys is None:
        raise UserError(f"{source}dspark_block_size: found none, expected the dspark_* keys")
    if keys.block_size > MAX_DECODE_TOKENS:
        expected = f"at most {MAX_DECODE_TOKENS}"
        raise UserError(f"{source}dspark_block_size: found {keys.block_size}, expected {expected}")
    for key, found, kind, end in (
        ("dspark_noise_token_id", keys.noise_token_id, "a token id", config.vocab_size),
        ("dspark_target_layer_ids", max(keys.target_layer_ids), "layers", config.num_hidden_layers),
    ):
        if found >= end:
            raise UserError(f"{source}{key}: found {found}, expected {kind} below {end}")


def _check_filled(config: ModelConfig, names: set[str], kind: MtpKind, stages: int) -> None:
    if kind == "dspark":
        check_keys(config)
    for name in parameters(config, kind, stages):
        if name.startswith("mtp.") and name not in names:
            raise UserError(f"{name}: found no such weight, expected all of the draft module")
