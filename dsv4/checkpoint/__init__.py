"""Checkpoint folders: opening, strict loading, conversion and synthetic weights (docs/checkpoints.md)."""

from dsv4.checkpoint.formats import mtp_kind
from dsv4.checkpoint.index import Checkpoint, open_checkpoint
from dsv4.checkpoint.load import ParameterDescription, Weights, describe, load_weights

__all__ = ["Checkpoint", "ParameterDescription", "Weights", "describe", "load_weights", "mtp_kind", "open_checkpoint"]
