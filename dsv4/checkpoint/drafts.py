"""The speculative module that a checkpoint has, by its tensor names (model.md#speculative-modules).

``num_nextn_predict_layers`` says 1 of every release and is not read.
"""

from dsv4.checkpoint.index import Checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import MtpKind, shown_mtp


def mtp_kind(checkpoint: Checkpoint) -> MtpKind | None:
    """The kind of speculative module that the tensor names show, if any."""
    shown = shown_mtp(checkpoint.names)
    return None if shown is None else shown[0]


def mtp_stages(checkpoint: Checkpoint) -> int:
    """How many ``mtp.{s}`` blocks the tensor names show."""
    shown = shown_mtp(checkpoint.names)
    return 0 if shown is None else shown[1]


def check_mtp(checkpoint: Checkpoint, config: ModelConfig, mtp: MtpKind) -> None:
    """Raises ``UserError`` unless ``checkpoint`` has a module of this kind, and for DSpark
    ``config`` its keys.
    """
    found = mtp_kind(checkpoint)
    if found != mtp:
        raise UserError(
            f"{checkpoint.folder}: mtp tensors: found {found or 'none'}, expected {mtp}"
        )
    stages = mtp_stages(checkpoint)
    if mtp == "classic" and stages > 1:
        raise UserError(
            f"{checkpoint.folder}: mtp tensors: found {stages} blocks of classic MTP, "
            "expected mtp.0 alone"
        )
    if mtp == "dspark" and config.dspark is None:
        raise UserError(
            f"{checkpoint.folder}/config.json: dspark_block_size: found none, "
            "expected the dspark_* keys"
        )
