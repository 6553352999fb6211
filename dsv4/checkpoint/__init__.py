"""Checkpoint folders: opening, strict loading, conversion and synthetic weights
(docs/checkpoints.md).
"""

from dsv4.checkpoint.drafts import mtp_kind
from dsv4.checkpoint.geometries import Geometry, geometry_config, tiny_config
from dsv4.checkpoint.index import Checkpoint, open_checkpoint
from dsv4.checkpoint.layouts import Layout
from dsv4.checkpoint.load import (
    ParameterDescription,
    Weights,
    describe,
    descriptions,
    held_by,
    load_ranks,
    load_weights,
    loading_ranks,
)
from dsv4.checkpoint.names import Dialect
from dsv4.checkpoint.synthetic import (
    synthetic_rank_weights,
    synthetic_weights,
    write_synthetic,
)
from dsv4.checkpoint.weights_folder import write_weights

__all__ = [
    "Checkpoint",
    "Dialect",
    "Geometry",
    "Layout",
    "ParameterDescription",
    "Weights",
    "describe",
    "descriptions",
    "geometry_config",
    "held_by",
    "load_ranks",
    "load_weights",
    "loading_ranks",
    "mtp_kind",
    "open_checkpoint",
    "synthetic_rank_weights",
    "synthetic_weights",
    "tiny_config",
    "write_synthetic",
    "write_weights",
]
