"""A checkpoint before any weight is read: its parameters, their devices and the memory plan."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dsv4.checkpoint import (
    Checkpoint,
    ParameterDescription,
    descriptions,
    held_by,
    loading_ranks,
    open_checkpoint,
)
from dsv4.checkpoint.identity import Identity, checkpoint_identity
from dsv4.checkpoint.packed_cache import PackedCache
from dsv4.checkpoint.stored_parameters import StoredParameter, find_parameters
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError, shorten
from dsv4.launch.constants import MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN
from dsv4.launch.target import Target
from dsv4.layers.weights import ReadOnce
from dsv4.opened_draft import OpenedDraft, checkpoint_decides
from dsv4.ops.hyper_connection.seam import MAX_STREAMS
from dsv4.ops.quantize_activations import NVFP4_LARGEST, hidden_global_scale
from dsv4.ops.tables import TABLES, DirectTable, Table
from dsv4.parallel.devices import (
    check_cuda_graph,
    check_planned_activations,
    engine_devices,
    table_name,
    table_on,
    with_device_defaults,
)
from dsv4.parallel.exchange_check import check_exchange
from dsv4.parallel.placement import Placement, bytes_by_layer
from dsv4.parallel.sharding import check_divisible
from dsv4.plan import MemoryPlan, available_bytes, max_context_tokens, plan_memory
from dsv4.progress import Progress, check_functions
from dsv4.step.planned import PlannedSteps
from dsv4.token_ids import check_integer
from dsv4.weights.packing_bytes import is_packed
from dsv4.weights.parameters import Parameter
from dsv4.weights.quant import QuantFormat

_LOG = logging.getLogger("dsv4")


class ModuleRefused(UserError):
    """A draft module that the ops do not take, of a model that they take."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The contents of a checkpoint, their placement and whether they fit.

    ``found``: all parameters but those of the ``draft`` module, of which ``config`` has the keys.
    ``steps``: the recorded steps of the CUDA ops; None with the torch ops.
    """

    checkpoint: Checkpoint
    found: list[StoredParameter]
    config: ModelConfig
    draft: OpenedDraft | None
    placement: Placement
    table: Table
    steps: PlannedSteps | None
    plan: MemoryPlan

    @classmethod
    def open(
        cls, path: str | Path, engine: EngineConfig, gpu_memory: int | None = None
    ) -> "OpenedCheckpoint":
        """Reads the headers of a checkpoint folder. Raises ``UserError`` for a bad folder and for
        a GPU or an installation without the ops that ``engine`` asks for.

        ``gpu_memory``: plans for Hopper GPUs with this many bytes each, which need not be there.
        """
        absent = gpu_memory is not None
        if absent:
            gpu_memory = check_integer("gpu_memory", gpu_memory, 1)
        checkpoint = open_checkpoint(path)
        config = checkpoint.model_config()
        found = find_parameters(checkpoint, config)
        stored = descriptions(found)
        all_devices = engine_devices(engine, absent)
        name = table_name(engine, all_devices)
        if absent:
            check_planned_activations(engine, name)
        ops = TABLES[name]
        if not isinstance(ops, DirectTable):
            _check_limits(checkpoint, config)
        if engine.prefill_activations == "nvfp4":
            _check_hidden_rows(checkpoint, config, stored)
        try:
            draft = OpenedDraft.open(checkpoint, config, engine, ops)
        except UserError as refusal:
            if not checkpoint_decides(engine):
                raise
            return cls._open_without_draft(path, engine, gpu_memory, str(refusal))
        if draft is not None:
            config = draft.config
            stored += draft.describe()
        formats = [(parameter, format) for parameter, format, _ in stored]
        sizes = ((description.parameter.name, description.nbytes) for description in stored)
        layer_bytes = bytes_by_layer(sizes, config.num_hidden_layers)
        placement = Placement.of(engine, all_devices, layer_bytes)
        if draft is not None and checkpoint_decides(engine) and not draft.has_place(placement):
            return cls._open_without_draft(path, engine, gpu_memory, "there is no place for it")
        check_divisible(config, formats, placement.ranks)
        devices = placement.devices
        engine = with_device_defaults(engine, devices)
        check_cuda_graph(engine, devices)
        table = ops if absent else table_on(engine, devices)
        held = held_by(stored, placement.ranks, 0)
        plan_steps = partial(_plan_steps, config, engine, held, table, placement, absent)
        try:
            steps = _accepted(checkpoint, draft, plan_steps)
        except ModuleRefused as refusal:
            if not checkpoint_decides(engine):
                raise
            return cls._open_without_draft(path, engine, gpu_memory, str(refusal))
        draft_bytes = 0 if draft is None else draft.state_bytes(engine, table, placement)
        plan = plan_memory(config, engine, placement, stored, steps, gpu_memory, draft_bytes)
        if draft is not None and checkpoint_decides(engine) and not plan.fits:
            return cls._open_without_draft(path, engine, gpu_memory, "there is no place for it")
        return cls(checkpoint, found, config, draft, placement, table, steps, plan)

    @classmethod
    def _open_without_draft(
        cls, path: str | Path, engine: EngineConfig, gpu_memory: int | None, reason: str
    ) -> "OpenedCheckpoint":
        """Where the checkpoint has a module that nobody asked for, and that cannot run."""
        _LOG.info("drafts: off, the checkpoint's module cannot run: %s", reason)
        return cls.open(path, replace(engine, draft="off", draft_tokens=None), gpu_memory)

    def changed_table(self, change: Callable[[Table], Table] | None) -> Table:
        """The op table, or what ``change`` makes of it. Raises ``UserError`` unless it is one."""
        check_functions(change_table=change)
        table = self.table if change is None else change(self.table)
        if not isinstance(table, Table):
            raise UserError(f"change_table: returned {shorten(table)}, expected an op table")
        return table

    def identity(self) -> Identity:
        """Which weights these are."""
        main = checkpoint_identity(self.checkpoint)
        if self.draft is None or self.draft.checkpoint is self.checkpoint:
            return Identity(main, main)
        return Identity(main, checkpoint_identity(self.draft.checkpoint))

    @contextmanager
    def reading(
        self,
        progress: Progress | None,
        packing: Progress | None,
        cache: PackedCache | None = None,
    ) -> Iterator[list[ReadOnce]]:
        """What each rank holds of the weights, on its device, while they are read: one that is
        taken is waited for, the rest at the end. ``progress(done_bytes, total_bytes)`` is told as
        they are read, by several threads in turn, ``packing`` as those of rank 0 are taken. What
        ``cache`` has is not read from the checkpoint, and what it lacks is written at the end.

        Raises ``UserError`` for GPUs whose ranks cannot exchange words.
        """
        if self.placement.ranks > 1 and self.steps is not None:
            check_exchange(self.placement.devices)
        draft = self.draft
        is_own = draft is not None and draft.checkpoint is self.checkpoint
        found = [*self.found, *(draft.found if draft is not None and is_own else ())]
        kept = None if cache is None else cache.read(self.placement.devices_of, progress)
        with loading_ranks(
            self.checkpoint,
            self.config,
            self.placement,
            found=found,
            progress=progress if kept is None else None,
            is_unneeded=_is_kept if kept is not None else lambda _: False,
        ) as loading:
            if draft is not None and not is_own:
                for weights, module in zip(loading.ranks, draft.load(self.placement), strict=True):
                    weights |= module
            packed: Sequence[dict[str, Any] | None] = [None] * len(loading.ranks)
            if cache is not None:
                packed = kept or [{} for _ in loading.ranks]
            ranks = [
                ReadOnce(weights, packing if rank == 0 else None, loading.wait, packed[rank])
                for rank, weights in enumerate(loading.ranks)
            ]
            yield ranks
        if cache is not None and kept is None:
            cache.write([_of_main_model(rank.packed or {}) for rank in ranks])


def _check_limits(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises ``UserError`` for a key of config.json beyond what any CUDA op takes: the ops would
    name a tensor, which no user wrote.
    """
    for key, found, most in (
        ("n_routed_experts", config.n_routed_experts, MAX_EXPERTS),
        ("num_experts_per_tok", config.num_experts_per_tok, MAX_EXPERTS_PER_TOKEN),
        ("hc_mult", config.hc_mult, MAX_STREAMS),
    ):
        if found > most:
            expected = f"at most {most} with the CUDA ops; EngineConfig.ops='torch' takes more"
            source = checkpoint.folder / "config.json"
            raise UserError(f"{source}: {key}: found {found}, expected {expected}")


def _check_hidden_rows(
    checkpoint: Checkpoint, config: ModelConfig, stored: Iterable[ParameterDescription]
) -> None:
    """Raises ``UserError`` where NVFP4 experts would read hidden rows with a global scale above 1:
    sixteen values below 6 · 2^-10 of it become zeros (docs/numerics.md#quantised-activations).
    """
    largest_weight = max(1.0, config.routed_scaling_factor)
    is_nvfp4 = any(format is QuantFormat.NVFP4 for _, format, _ in stored)
    if is_nvfp4 and hidden_global_scale(config.swiglu_limit, largest_weight) > 1:
        most = math.sqrt(NVFP4_LARGEST / largest_weight)
        source = checkpoint.folder / "config.json"
        found = f"found {config.swiglu_limit:g}, expected at most {most:.3g}"
        raise UserError(
            f"{source}: swiglu_limit: {found} (for routing weights up to {largest_weight:g}) with "
            "EngineConfig.prefill_activations='nvfp4', in which small hidden values become zeros"
        )


def _is_kept(parameter: Parameter) -> bool:
    """Whether a ``PackedCache`` has it: the draft module may come from another folder."""
    return is_packed(parameter) and not parameter.name.startswith("mtp.")


def _of_main_model(packed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in packed.items() if not name.startswith("mtp.")}


def _accepted(
    checkpoint: Checkpoint,
    draft: OpenedDraft | None,
    plan_steps: Callable[[OpenedDraft | None], PlannedSteps | None],
) -> PlannedSteps | None:
    """``plan_steps(draft)``. Raises ``UserError`` that names the geometry which an op refuses,
    ``ModuleRefused`` where it is that of the draft module.
    """
    try:
        return plan_steps(draft)
    except UserError:
        raise
    except ValueError as error:
        if draft is not None:
            _accepted(checkpoint, None, plan_steps)
            source = draft.checkpoint.folder
            advice = "EngineConfig.draft='off' does without it"
            raise ModuleRefused(
                f"{source}: found a draft module that the CUDA ops do not take ({error}), "
                f"expected another one; {advice}"
            ) from error
        raise UserError(
            f"{checkpoint.folder / 'config.json'}: found a geometry that the CUDA ops do not take "
            f"({error}), expected another one; EngineConfig.ops='torch' takes more"
        ) from error


def _plan_steps(
    config: ModelConfig,
    engine: EngineConfig,
    held: Iterable[ParameterDescription],
    table: Table,
    placement: Placement,
    absent: bool,
    draft: OpenedDraft | None,
) -> PlannedSteps | None:
    """The steps of rank 0 with a recorded table on the GPUs of this machine, or on ``absent`` ones,
    without memory; None for the torch ops. ``held``: what the rank holds.
    """
    if isinstance(table, DirectTable):
        return None
    devices = tuple(dict.fromkeys(placement.of_rank(0).layer_devices))
    if not absent:
        for device in devices:
            # Refuses a device that is full by its name, before its driver is asked for more.
            available_bytes(device)
    target_of = Target.of_absent if absent else Target.of
    targets = {device: target_of(device) for device in devices}
    engine = replace(engine, max_context=max_context_tokens(config, engine))
    formats = [(parameter, format) for parameter, format, _ in held]
    along = None if draft is None else draft.planned(engine, table)
    return PlannedSteps.of(config, engine, formats, table, targets, placement, along)
