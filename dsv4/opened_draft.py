"""The draft module of a run before any weight is read: which one, where it lies, what it takes."""

from dataclasses import dataclass, replace

from dsv4.checkpoint import (
    Checkpoint,
    ParameterDescription,
    Weights,
    descriptions,
    open_checkpoint,
)
from dsv4.checkpoint.drafts import mtp_kind, mtp_stages
from dsv4.checkpoint.load import load_found_ranks
from dsv4.checkpoint.stored_parameters import StoredParameter, find_draft
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops.tables import RecordedTable, Table
from dsv4.parallel.placement import Placement
from dsv4.parallel.sharding import is_divisible
from dsv4.speculative.module import DraftScope, check_keys, far_layer
from dsv4.speculative.planned import draft_bytes, planned_along
from dsv4.speculative.tally import DraftCount, drafts_of_a_step
from dsv4.step.planned import MakeAlong
from dsv4.weights.parameters import MtpKind

KIND_OF_FLAG: dict[str, MtpKind] = {"mtp": "classic", "dspark": "dspark"}
FLAG_OF_KIND = {kind: flag for flag, kind in KIND_OF_FLAG.items()}


@dataclass(frozen=True)
class OpenedDraft:
    """``checkpoint`` holds the ``found`` parameters; ``config`` is the model's with the dspark keys
    that go with them.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    kind: MtpKind
    found: list[StoredParameter]

    @classmethod
    def open(
        cls, main: Checkpoint, config: ModelConfig, engine: EngineConfig, table: Table
    ) -> "OpenedDraft | None":
        """The module that ``engine`` asks for: of ``main``, a checkpoint of ``config``, or of
        ``engine.draft_weights``. None where drafts are off, and where "auto" finds none. Without a
        folder "auto" takes a module with the CUDA ops alone, and not with layers that take turns on
        the devices: with the torch ops drafts cost more than they save.

        Raises ``UserError`` for a module that is not there, not whole, or that cannot run.
        """
        if engine.draft == "off":
            return None
        if checkpoint_decides(engine):
            pays = isinstance(table, RecordedTable) and engine.parallel != "round-robin"
            if not pays or mtp_kind(main) is None:
                return None
        holder = main if engine.draft_weights is None else open_checkpoint(engine.draft_weights)
        kind = mtp_kind(holder)
        wanted = tuple(KIND_OF_FLAG) if engine.draft == "auto" else (engine.draft,)
        if kind is None or FLAG_OF_KIND[kind] not in wanted:
            shown = "none" if kind is None else FLAG_OF_KIND[kind]
            expected = " or ".join(wanted)
            raise UserError(f"{holder.folder}: draft module: found {shown}, expected {expected}")
        if holder is not main:
            config = replace(config, dspark=holder.model_config().dspark)
        found = find_draft(holder, config, kind)
        if kind == "dspark":
            check_keys(config, f"{holder.folder}/config.json: ")
        scope = DraftScope.planned(config, kind)
        # Refuses what the steps would refuse, before any weight is read.
        DraftCount.asked(drafts_of_a_step(engine), scope.most, scope.trained_block)
        return cls(holder, config, kind, found)

    @property
    def shown(self) -> tuple[MtpKind, int]:
        """Kind and number of blocks, as ``dsv4.weights.parameters.shown_mtp``."""
        return self.kind, mtp_stages(self.checkpoint)

    def describe(self) -> list[ParameterDescription]:
        """Format and bytes of every parameter."""
        return descriptions(self.found)

    def state_bytes(self, engine: EngineConfig, table: Table, placement: Placement) -> int:
        """Bytes of the module's caches, and of what else it takes beside the head of a rank."""
        recorded = isinstance(table, RecordedTable)
        return draft_bytes(self.config, engine, self.shown, recorded, placement)

    def planned(self, engine: EngineConfig, table: RecordedTable) -> MakeAlong:
        """The module as it runs along with the steps of a planned model."""
        return planned_along(self.config, engine, table, self.shown)

    def has_place(self, placement: Placement) -> bool:
        """Whether the layers that the module reads are on the device of the head, and the ranks can
        share the module.
        """
        formats = [(stored.parameter, stored.format) for stored in self.found]
        devices = dict(enumerate(placement.of_rank(0).layer_devices))
        is_near = far_layer(DraftScope.planned(self.config, self.kind).layers, devices) is None
        return is_near and is_divisible(self.config, formats, placement.ranks)

    def load(self, placement: Placement) -> tuple[Weights, ...]:
        """What every rank holds of the weights, on its device."""
        return load_found_ranks(self.checkpoint, self.config, self.found, placement)


def checkpoint_decides(engine: EngineConfig) -> bool:
    """Whether the checkpoint decides if there is a module."""
    return engine.draft == "auto" and engine.draft_weights is None
