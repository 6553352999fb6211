"""What a draft module takes, and what it runs, before any weight is read."""

from collections.abc import Sequence

import torch

from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.caches.state import DecodeState
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.layers.weights import Weights
from dsv4.model import Transformer
from dsv4.ops.tables import RecordedTable
from dsv4.speculative.memory import DraftMemory
from dsv4.speculative.module import allocate_draft, build_draft, layers_read
from dsv4.speculative.recorded_drafts import record_drafts
from dsv4.step.along import Along
from dsv4.step.planned import MakeAlong
from dsv4.weights.parameters import MtpKind


def draft_bytes(
    config: ModelConfig,
    engine: EngineConfig,
    shown: tuple[MtpKind, int],
    recorded: bool,
    devices: Sequence[torch.device],
) -> int:
    """Bytes of ``allocate_draft`` and of what else a module takes besides its weights, on the last
    of ``devices``, computed without allocating. ``recorded``: with the CUDA ops.
    """
    state = allocate_draft(config, engine, shown, torch.device("meta"))
    dtype = COMPUTE_DTYPES[engine.compute_dtype]
    total = state.nbytes
    if len(devices) > 1:
        total += config.vocab_size * config.hidden_size * dtype.itemsize
    if recorded:
        taps = len(layers_read(config, shown[0]))
        total += DraftMemory.allocate(config, state, devices, taps, dtype).nbytes
    return total


def planned_along(
    config: ModelConfig, engine: EngineConfig, table: RecordedTable, shown: tuple[MtpKind, int]
) -> MakeAlong:
    """The module that runs along with a planned model."""

    def make(model: Transformer, weights: Weights, state: DecodeState) -> Along:
        module = build_draft(config, weights, table, shown, model)
        state.draft = allocate_draft(config, engine, shown, torch.device("meta"))
        return record_drafts(config, module, model, state, table)

    return make
