"""The speculative module that a checkpoint has, by its tensor names (model.md#speculative-modules).

``num_nextn_predict_layers`` says 1 of every release and is not read.
"""

import re

from dsv4.checkpoint.index import Checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import MtpKind

_STAGE = re.compile(r"mtp\.([0-9]{1,3})\.")


def mtp_kind(checkpoint: Checkpoint) -> MtpKind | None:
    """The kind of speculative module that the tensor names show, if any."""
    names = [
        name for name in (*checkpoint.tensors, *checkpoint.unreadable) if name.startswith("mtp.")
    ]
    if any(".main_proj." in name or ".markov_head." in name for name in names):
        return "dspark"
    return "classic" if names else None


def mtp_stages(checkpoint: Checkpoint) -> int:
    """How many ``mtp.{s}`` blocks the tensor names show."""
    matches = map(_STAGE.match, (*checkpoint.tensors, *checkpoint.unreadable))
    return max((int(match[1]) for match in matches if match is not None), default=-1) + 1


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
