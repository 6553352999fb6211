"""Ranks of a published geometry on weights and caches that have no memory, and what their steps
would queue: stand-ins write it into one log.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dsv4.checkpoint import Geometry, Layout, geometry_config
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.launch.items import Launch
from dsv4.model import Transformer
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.parallel.sharding import local_config, local_parameters
from dsv4.plan import max_context_tokens
from dsv4.sampling import SamplerState
from dsv4.step.lock_step import LockStep
from dsv4.step.planned import planned_weight
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import RING_TOKENS, TokenLoopMemory
from dsv4.step.step import Step
from tests.step.memory_order import FakeEvent, FakeStream
from tests.step.planned_model import ENGINE, GPUS, META, FakeProgram, PlannedModel

# Kernels that write words, and those that wait for them: a product does either.
_PUSHING = ("decode_linear", "decode_pair", "moe_decode")
_POLLING = ("decode_linear", "hc_mix", "hc_post", "gather_logits")


def planned_ranks(
    name: Geometry, ranks: int, layers: int | None = 6, layout: Layout = "nvfp4-experts"
) -> list[PlannedModel]:
    """What every rank records, each on a GPU of its own."""
    config = ModelConfig.from_dict(geometry_config(name, layers))
    placement = Placement.tensor(config.num_hidden_layers, GPUS[:ranks])
    context = max_context_tokens(config, ENGINE)
    state = allocate_state(config, ENGINE, context, placement, planned=True)
    local = local_config(config, ranks)
    found = []
    for rank in range(ranks):
        devices = placement.of_rank(rank).layer_devices
        weights = {
            parameter.name: planned_weight(parameter, format_in(layout, parameter))
            for parameter in local_parameters(config, ranks, rank).values()
        }
        model = Transformer.build(local, weights, CUDA_TABLE.packing, devices, torch.bfloat16)
        ring = torch.zeros(RING_TOKENS, dtype=torch.int64, device=META)
        loop = TokenLoopMemory(SamplerState.allocate(META), ring)
        own = state.ranks[rank]
        found.append(PlannedModel(local, CUDA_TABLE, devices, model, own, loop))
    return found


def launches(step: RecordedStep) -> list[Launch]:
    """Those of a rank, whose recording is the only one."""
    (recording,) = step.recordings.values()
    return [item for item in recording.items if isinstance(item, Launch)]


def has_words(launch: Launch) -> bool:
    """Whether it pushes or polls."""
    return launch.arguments.get("peers") is not None and "exchange" in launch.arguments


def pushes(launch: Launch) -> bool:
    """Whether a launch with words writes them, or waits for them."""
    is_pushing = "GATHERS" not in dict(launch.shape.kernel.defines)
    is_pushing = is_pushing and launch.signature.kernel in _PUSHING
    assert is_pushing or launch.signature.kernel in _POLLING
    return is_pushing


def exchange_of(launch: Launch) -> tuple[str, int]:
    """What the words are, a sum or rows that ranks share, and their number."""
    number = launch.arguments["exchange"]
    assert isinstance(number, int)
    are_rows = {"SHARES", "GATHERS"} & set(dict(launch.shape.kernel.defines))
    return ("rows" if are_rows else "sum"), number


def sharing_layers(planned: PlannedModel, ranks: int) -> list[int]:
    """The layers whose input rows the ranks share: those of most bytes."""
    is_flash = planned.config.hidden_size == 4096
    shared = (4,) if is_flash and ranks == 2 else (4, 128)
    return [layer for layer, one in enumerate(planned.config.compress_ratios) if one in shared]


@dataclass
class LoggedRanks:
    """A step of all ranks on stand-ins. ``log``: every item as (device, index), (device, "record")
    where a rank says how far it has come, and (device, other) where it waits for what another said.
    """

    step: LockStep
    log: list[Any]

    @classmethod
    def of(
        cls, planned: list[PlannedModel], tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> "LoggedRanks":
        log: list[Any] = []
        monkeypatch.setattr(
            "dsv4.step.step.Program", lambda recording, _: FakeProgram(log, recording)
        )
        monkeypatch.setattr("torch.cuda.device", _NoDevice)
        monkeypatch.setattr("torch.cuda.Event", FakeEvent)
        monkeypatch.setattr("torch.cuda.current_stream", lambda device: FakeStream(device, log))
        steps = [Step(model.record(tokens), {}, {}) for model in planned]
        return cls(LockStep(steps, planned[0].state), log)

    def launch(self, entry: Any) -> Launch | None:
        """What an entry of the log launches."""
        device, index = entry
        if not isinstance(index, int):
            return None
        item = self.step.ranks[device.index].recorded.recordings[device].items[index]
        return item if isinstance(item, Launch) else None


class _NoDevice:
    """Stands for ``torch.cuda.device`` where there is none."""

    def __init__(self, device: torch.device) -> None:
        """Any device."""

    def __enter__(self) -> None:
        """Nothing changes."""

    def __exit__(self, *_: object) -> None:
        """Nothing changes."""
