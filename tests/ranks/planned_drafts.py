"""Ranks of a published geometry with a draft module, on weights and caches that have no memory."""

from dataclasses import dataclass

import torch

from dsv4.bench.drafts import drafted_geometry
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import Geometry, geometry_config
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.model import Transformer
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.parallel.sharding import local_config, local_parameters
from dsv4.plan import max_context_tokens
from dsv4.sampling import SamplerState
from dsv4.speculative.module import allocate_draft, build_draft
from dsv4.speculative.recorded_drafts import RecordedDrafts, record_drafts
from dsv4.step.planned import planned_weight
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import RING_TOKENS, StepRecorder, TokenLoopMemory, record_step
from dsv4.weights.parameters import MtpKind
from tests.step.planned_model import ENGINE, GPUS, META, TARGETS

STAGES: dict[MtpKind, int] = {"classic": 1, "dspark": 3}


@dataclass(frozen=True)
class PlannedDrafts:
    """A rank's model, its state and its module."""

    model: Transformer
    state: DecodeState
    along: RecordedDrafts
    sampler: SamplerState

    @property
    def device(self) -> torch.device:
        return self.model.head_device

    def draft_step(self, count: int) -> RecordedStep:
        """The step that makes so many drafts."""
        return self.along.draft_step({self.device: TARGETS[self.device]}, self.sampler, count)

    def tail_step(self) -> RecordedStep:
        """The module's rows of a prompt."""
        (found,) = self.along.steps_apart(TARGETS[self.device])
        return found

    def record(self, tokens: int, drafted: bool = True) -> RecordedStep:
        """A step of the model, with the module's rows if it is ``drafted``."""
        inputs = {self.device: torch.empty(tokens, dtype=torch.int64, device=META)}
        recorder = StepRecorder(CUDA_TABLE, TARGETS, self.state, inputs)
        ring_R = torch.empty(RING_TOKENS, dtype=torch.int64, device=META)
        loop = TokenLoopMemory(self.sampler, ring_R)
        along = (self.along, self.sampler) if drafted else None
        return record_step(self.model, self.state, recorder, loop, along)


def planned_drafts(
    name: Geometry, kind: MtpKind, ranks: int, layers: int = 5
) -> list[PlannedDrafts]:
    """Those of every rank, each on a GPU of its own."""
    config = ModelConfig.from_dict(drafted_geometry(geometry_config(name, layers), kind))
    placement = Placement.tensor(config.num_hidden_layers, GPUS[:ranks])
    context = max_context_tokens(config, ENGINE)
    state = allocate_state(config, ENGINE, context, placement, planned=True)
    local = local_config(config, ranks)
    shown = kind, STAGES[kind]
    models = []
    modules = []
    for rank in range(ranks):
        weights = {
            parameter.name: planned_weight(parameter, format_in("nvfp4-experts", parameter))
            for parameter in local_parameters(config, ranks, rank, kind).values()
        }
        devices = placement.of_rank(rank).layer_devices
        packing = CUDA_TABLE.packing
        models.append(Transformer.build(local, weights, packing, devices, torch.bfloat16))
        modules.append(build_draft(local, weights, CUDA_TABLE, shown, models[-1]))
        state.ranks[rank].draft = allocate_draft(config, ENGINE, shown, META)
    alongs = record_drafts(config, modules, models, state, CUDA_TABLE)
    return [
        PlannedDrafts(model, own, along, SamplerState.allocate(META))
        for model, own, along in zip(models, state.ranks, alongs, strict=True)
    ]
