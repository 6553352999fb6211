"""What the flags of all comparisons with a reference have in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from dsv4.command.output_file import check_output, refuse_shared_files
from dsv4.errors import UserError
from dsv4.ops.tables import TableName

DEFAULT_CHUNK = 512


def parse_swaps(options: list[str]) -> dict[str, TableName]:
    """``["moe=torch"]`` to ``{"moe": "torch"}``. Raises ``UserError``."""
    swaps: dict[str, TableName] = {}
    for option in options:
        op, _, source = option.partition("=")
        if source not in ("torch", "cuda"):
            raise UserError(f"--swap: found {option!r}, expected OP=torch or OP=cuda")
        swaps[op] = source
    return swaps


def check_reference_device(device: str) -> None:
    """Raises ``UserError`` that names the reference's flag, before our side has run."""
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise UserError("--reference-device cuda: found no CUDA device, expected one")


def check_outputs(options: argparse.Namespace, read: Sequence[tuple[str, Path | None]]) -> None:
    """Raises ``UserError`` when ``--json`` or ``--svg`` cannot be written, both are one file, or
    one is among the files of flags that are ``read``, or of the model.
    """
    written = [("--json", options.json), ("--svg", options.svg)]
    refuse_shared_files(read, written, options.model)
    for flag, path in written:
        if path is not None:
            check_output(flag, path)
