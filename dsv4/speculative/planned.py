"""What a draft module takes, and what it runs, before any weight is read."""

import torch

from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.caches.state import DecodeState
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.layers.weights import Weights
from dsv4.model import Transformer
from dsv4.ops.tables import RecordedTable
from dsv4.parallel.placement import Placement
from dsv4.parallel.sharding import local_config
from dsv4.speculative.memory import DraftMemory
from dsv4.speculative.module import DraftScope, allocate_draft, build_draft
from dsv4.speculative.recorded_drafts import record_drafts
from dsv4.step.along import Along
from dsv4.step.planned import MakeAlong
from dsv4.weights.parameters import MtpKind


def draft_bytes(
    config: ModelConfig,
    engine: EngineConfig,
    shown: tuple[MtpKind, int],
    recorded: bool,
    placement: Placement,
) -> int:
    """Bytes of ``allocate_draft`` and of what else a module takes besides its weights, on the
    device of the head of every rank, computed without allocating. ``recorded``: with the CUDA ops.
    """
    state = allocate_draft(config, engine, shown, torch.device("meta"))
    dtype = COMPUTE_DTYPES[engine.compute_dtype]
    total = state.nbytes
    devices = placement.of_rank(0).devices
    if len(devices) > 1:
        total += config.vocab_size * config.hidden_size * dtype.itemsize
    if recorded:
        taps = len(DraftScope.planned(config, shown[0]).layers)
        ranks = placement.cuts
        total += DraftMemory.allocate(config, state, devices, taps, dtype, ranks).nbytes
    return total


def planned_along(
    config: ModelConfig, engine: EngineConfig, table: RecordedTable, shown: tuple[MtpKind, int]
) -> MakeAlong:
    """The module that runs along with a planned model, of several ranks that of rank 0."""

    def make(model: Transformer, weights: Weights, state: DecodeState) -> Along:
        local = local_config(config, 1 if state.peers is None else state.peers.ranks)
        module = build_draft(local, weights, table, shown, model)
        state.draft = allocate_draft(config, engine, shown, torch.device("meta"))
        (found,) = record_drafts(config, [module], [model], state, table)
        return found

    return make
