"""The draft module of a run before any weight is read: which one, where it lies, what it takes."""

from dataclasses import dataclass, replace

from dsv4.checkpoint import Checkpoint, ParameterDescription, Weights, open_checkpoint
from dsv4.checkpoint.drafts import mtp_kind, mtp_stages
from dsv4.checkpoint.load import load_found
from dsv4.checkpoint.stored_parameters import StoredParameter, find_draft
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops.tables import DirectTable, Table
from dsv4.parallel.placement import Placement
from dsv4.speculative.module import draft_state_bytes
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
        ``engine.draft_weights``. None where drafts are off: "auto" without a folder takes no module
        yet, because with the torch ops they cost more than they save, and the CUDA ops have none.

        Raises ``UserError`` for a module that is not there, not whole, or that ``table`` cannot
        run.
        """
        if engine.draft == "off" or (engine.draft == "auto" and engine.draft_weights is None):
            return None
        if not isinstance(table, DirectTable):
            raise UserError(
                f"EngineConfig.draft: found {engine.draft!r} with the CUDA ops, "
                "expected 'off', or EngineConfig.ops='torch'"
            )
        if engine.parallel == "tensor":
            raise UserError(
                f"EngineConfig.draft: found {engine.draft!r} with EngineConfig.parallel='tensor', "
                "expected 'off'"
            )
        holder = main if engine.draft_weights is None else open_checkpoint(engine.draft_weights)
        kind = mtp_kind(holder)
        wanted = FLAG_OF_KIND if engine.draft == "auto" else {KIND_OF_FLAG[engine.draft]}
        if kind is None or kind not in wanted:
            names = " or ".join(FLAG_OF_KIND[name] for name in wanted)
            found = "none" if kind is None else FLAG_OF_KIND[kind]
            raise UserError(f"{holder.folder}: draft module: found {found}, expected {names}")
        if holder is not main:
            config = with_dspark_of(config, holder)
        return cls(holder, config, kind, find_draft(holder, config, kind))

    @property
    def shown(self) -> tuple[MtpKind, int]:
        """Kind and number of blocks, as ``dsv4.weights.parameters.shown_mtp``."""
        return self.kind, mtp_stages(self.checkpoint)

    def describe(self) -> list[ParameterDescription]:
        """Format and bytes of every parameter."""
        return [
            ParameterDescription(stored.parameter, stored.format, stored.nbytes)
            for stored in self.found
        ]

    def state_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the module's caches."""
        return draft_state_bytes(self.config, engine, self.shown)

    def load(self, placement: Placement) -> Weights:
        """The weights, each on its device."""
        return load_found(self.checkpoint, self.config, self.found, placement.device_of)


def with_dspark_of(config: ModelConfig, holder: Checkpoint) -> ModelConfig:
    """``config`` with the dspark keys of another folder."""
    source = str(holder.folder / "config.json")
    return replace(config, dspark=ModelConfig.from_dict(holder.raw_config, source).dspark)
