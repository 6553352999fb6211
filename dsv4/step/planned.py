"""The needs of a step, before any weight is read: the model recorded on weights and caches that
have no memory.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.caches.allocation import COMPUTE_DTYPES, prefill_tokens
from dsv4.caches.state import DecodeState
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.launch.kernel import Kernel
from dsv4.launch.target import Target
from dsv4.layers.weights import Weights
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Transformer
from dsv4.ops import Packing
from dsv4.ops.tables import RecordedTable
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.parallel.sharding import local_config
from dsv4.sampling import SamplerState
from dsv4.step.along import Along
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import RING_TOKENS, StepRecorder, TokenLoopMemory, record_step
from dsv4.step.token_feed import given_by_host
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import QuantFormat, QuantTensor, planned_quant_tensor
from dsv4.weights.shared_rows import shares_of

# Of a planned model, its weights and its state.
MakeAlong = Callable[[Transformer, Weights, DecodeState], Along]
StoredFormats = Iterable[tuple[Parameter, QuantFormat | None]]


@dataclass(frozen=True)
class PlannedSteps:
    """The longest decode and prefill steps of an engine, recorded without memory, and how their
    table packs weights. ``apart``: steps that do not share the memory of the others.
    ``head_bytes``: what devices hold of the head beside the one that has all of it.
    """

    steps: tuple[RecordedStep, ...]
    packing: Packing
    apart: tuple[RecordedStep, ...] = ()
    head_bytes: Mapping[torch.device, int] = field(default_factory=dict[torch.device, int])

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        engine: EngineConfig,
        stored: StoredFormats,
        table: RecordedTable,
        targets: Mapping[torch.device, Target],
        placement: Placement,
        along: MakeAlong | None = None,
    ) -> "PlannedSteps":
        """``engine`` says how long the context is. ``stored``: every parameter with its format.

        With several ranks the steps are those of rank 0, ``stored`` is what it holds, and
        ``config`` that of the whole model. ``along`` makes what runs along with it.
        """
        max_context = engine.max_context
        assert max_context is not None, "caches have a length"
        local = local_config(config, placement.cuts)
        layer_devices = placement.of_rank(0).layer_devices
        weights = {
            parameter.name: planned_weight(parameter, format) for parameter, format in stored
        }
        dtype = COMPUTE_DTYPES[engine.compute_dtype]
        model = Transformer.build(local, weights, table.packing, layer_devices, dtype)
        state = allocate_state(config, engine, max_context, placement, planned=True)
        found = None if along is None else along(model, weights, state)
        lengths = {1, MAX_DECODE_TOKENS, prefill_tokens(engine, max_context)}
        steps = [_record(model, state, table, targets, n, found) for n in sorted(lengths)]
        apart: list[RecordedStep] = []
        if found is not None:
            steps += found.own_steps(targets, SamplerState.allocate(torch.device("meta")))
            apart = found.steps_apart(targets[model.head_device])
        shares = shares_of(model.head.lm_head)
        head_bytes = {share.device: share.rows.nbytes for share in shares[:-1]}
        return cls(tuple(steps), table.packing, tuple(apart), head_bytes)

    def workspace_bytes(self) -> dict[torch.device, int]:
        """The largest workspace of any step, by device: steps share it. Those apart have theirs."""
        sizes = [step.workspace_bytes() for step in self.steps]
        apart = [step.workspace_bytes() for step in self.apart]
        return {
            device: max(size.get(device, 0) for size in sizes)
            + sum(size.get(device, 0) for size in apart)
            for device in sizes[0]
        }

    def kernels(self) -> set[tuple[Kernel, str]]:
        """Every kernel of the steps, with its architecture."""
        return {kernel for step in (*self.steps, *self.apart) for kernel in step.kernels()}


def planned_weight(parameter: Parameter, format: QuantFormat | None) -> QuantTensor | Tensor:
    """A parameter of this format without its values."""
    if format is not None:
        return planned_quant_tensor(format, parameter.shape)
    dtype = torch.int64 if parameter.role is Role.TABLE else torch.float32
    return torch.empty(parameter.shape, dtype=dtype, device="meta")


def _record(
    model: Transformer,
    state: DecodeState,
    table: RecordedTable,
    targets: Mapping[torch.device, Target],
    tokens: int,
    along: Along | None,
) -> RecordedStep:
    inputs = {
        device: torch.empty(tokens, dtype=torch.int64, device="meta") for device in state.devices
    }
    channels = None if along is not None else state.channels
    given = given_by_host(inputs, model.head_device, channels)
    recorder = StepRecorder(table, targets, state, inputs)
    recorder.await_tokens(given)
    sampler = SamplerState.allocate(torch.device("meta"))
    loop = TokenLoopMemory(sampler, torch.empty(RING_TOKENS, dtype=torch.int64, device="meta"))
    beside = None if along is None else (along, sampler)
    return record_step(model, state, recorder, loop, beside)
