"""Matrices of a checkpoint: memory for what each rank holds of one, and the bytes that fill it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.finite import check_finite
from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.pieces import Piece, Share
from dsv4.checkpoint.scale_values import check_scales
from dsv4.checkpoint.stored_parameters import Part, StoredParameter
from dsv4.checkpoint.transfer import transfer
from dsv4.weights.cut import COLUMNS, Cut, part_cuts
from dsv4.weights.parameters import Role
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes


class Held(NamedTuple):
    """What a rank holds of a parameter, and where; ``cut`` None: all of it."""

    device: torch.device
    cut: Cut | None


def load_matrix(
    checkpoint: Checkpoint, stored: StoredParameter, device: torch.device, expert: int | None = None
) -> QuantTensor:
    """One LINEAR, EXPERT or FLOOR parameter on ``device``, or only one ``expert`` of it (without
    the stack dimension).

    Raises ``UserError`` for scales out of range, and for NaN and infinity.
    """
    (weight,), pieces = unfilled_matrices(checkpoint, stored, [Held(device, None)], expert)
    transfer(pieces, lambda _: None)
    check_finite(checkpoint, stored, weight, expert or 0)
    check_scales(checkpoint, stored, weight, expert or 0)
    return weight


def unfilled_matrices(
    checkpoint: Checkpoint,
    stored: StoredParameter,
    held: Sequence[Held],
    expert: int | None = None,
) -> tuple[list[QuantTensor], list[Piece]]:
    """What is ``held`` of a matrix, or of one ``expert`` of it, with empty memory, and the pieces
    of the files that fill it all.
    """
    format = stored.format
    shape = stored.parameter.shape
    assert format is not None
    count = shape[0] if stored.parameter.role is Role.EXPERT else 1
    experts = range(count)
    if expert is not None:
        experts = range(expert, expert + 1)
        shape = shape[1:]
    memory: list[dict[str, Tensor]] = [{} for _ in held]
    pieces: list[Piece] = []
    for name, part_shape in packed_shapes(format, shape).items():
        if part_shape is None:
            continue
        part = stored.parts[name]
        dtype = _loaded_dtype(format, name, part)
        cuts = [None if one.cut is None else part_cuts(format, one.cut)[name] for one in held]
        for tensors, one, cut in zip(memory, held, cuts, strict=True):
            local = part_shape if cut is None else cut.shape(part_shape)
            tensors[name] = torch.empty(local, dtype=dtype, device=one.device)
        rows, width, spans = _byte_columns(part_shape, dtype.itemsize, len(experts), cuts)
        targets = [_bytes_of_matrices(tensors[name], len(experts)) for tensors in memory]
        for index, *own in zip(experts, *targets, strict=True):
            file, offset = _byte_range(checkpoint, part, index, count)
            shares = tuple(Share(target, *span) for target, span in zip(own, spans, strict=True))
            pieces.append(Piece(file, offset, rows, width, shares, stored.parameter.name))
    weights = [
        QuantTensor(
            tensors["data"],
            tensors.get("block_scale"),
            tensors.get("global_scale"),
            format,
            shape if one.cut is None else one.cut.shape(shape),
        )
        for tensors, one in zip(memory, held, strict=True)
    ]
    return weights, pieces


def _byte_columns(
    shape: tuple[int, ...], itemsize: int, matrices: int, cuts: Sequence[Cut | None]
) -> tuple[int, int, list[tuple[int, int]]]:
    """One of ``matrices`` of a part as rows of bytes, (rows, width), and which bytes of every row
    belong to each of ``cuts``. Where no columns are cut the matrix is one row.
    """
    nbytes = math.prod(shape) // matrices * itemsize
    width = math.prod(shape[-1:]) * itemsize
    if not any(cut is not None and cut.dimension == COLUMNS for cut in cuts):
        spans = [
            (0, nbytes) if cut is None else (cut.first * width, cut.stop * width) for cut in cuts
        ]
        return 1, nbytes, spans
    spans = [
        (cut.first * itemsize, cut.stop * itemsize)
        for cut in cuts
        if cut is not None and cut.dimension == COLUMNS
    ]
    return nbytes // width, width, spans


def _bytes_of_matrices(tensor: Tensor, matrices: int) -> tuple[Tensor, ...]:
    """The memory of every matrix of a stack, ``[bytes]``. Bytes only: a conversion of E8M0 would
    destroy the scales (model.md#codes-and-scales).
    """
    return tensor.view(-1).view(torch.uint8).view(matrices, -1).unbind()


def _byte_range(checkpoint: Checkpoint, part: Part, expert: int, experts: int) -> tuple[Path, int]:
    """Where the bytes of one of ``experts`` of a part begin; a plain matrix is expert 0 of 1."""
    if not part.fused:
        stored = checkpoint.tensors[part.names[expert]]
        return stored.file, stored.offset
    stored = checkpoint.tensors[part.names[0]]
    size = stored.nbytes // experts
    half = 0 if part.half is None else part.half * (size // 2)
    return stored.file, stored.offset + expert * size + half


def _loaded_dtype(format: QuantFormat, name: str, part: Part) -> torch.dtype:
    if name == "data" and format in (QuantFormat.NVFP4, QuantFormat.MXFP4):
        return torch.uint8
    return part.dtype
