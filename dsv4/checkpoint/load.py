"""Loads the parameters of a config from a checkpoint, bytes as stored, straight to the devices that
own them.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.problems import Problems
from dsv4.checkpoint.stored_parameters import Part, StoredParameter, find_parameters, mtp_kind
from dsv4.checkpoint.transfer import Piece, transfer
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import MtpKind, Parameter, Role
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes

Weights = dict[str, QuantTensor | Tensor]

_LOG = logging.getLogger("dsv4")
# Scales of released weights are far below 1. A converter that took the E8M0 byte of one for a
# number writes 100 or more.
_LARGEST_BLOCK_SCALE = 64.0


class ParameterDescription(NamedTuple):
    """The bytes of a parameter once loaded; ``format`` is None for NORM, FLOAT and TABLE."""

    parameter: Parameter
    format: QuantFormat | None
    nbytes: int


def describe(
    checkpoint: Checkpoint, config: ModelConfig, mtp: MtpKind | None = None
) -> list[ParameterDescription]:
    """Format and device bytes of every parameter, from names and headers alone. Raises like
    ``load_weights``.
    """
    found = find_parameters(checkpoint, config, mtp)
    return [
        ParameterDescription(stored.parameter, stored.format, stored.nbytes) for stored in found
    ]


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device_of: Callable[[str], torch.device],
    mtp: MtpKind | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """All parameters by canonical name, each on ``device_of(name)``.

    LINEAR, EXPERT (stacked) and FLOOR become ``QuantTensor``s of the stored bytes; NORM a bfloat16
    or float32 vector as stored; FLOAT float32; TABLE int64. One thread per device fills its
    matrices (``transfer``); ``progress`` is called with (bytes done, bytes in all), by one thread
    at a time. Raises one ``UserError`` with everything that does not fit, before anything is
    loaded; and one for what only the values show: NaN or infinity in small tensors, expert ids or
    scales out of range.
    """
    found = find_parameters(checkpoint, config, mtp)
    skipped = mtp_kind(checkpoint)
    if skipped is not None and mtp is None:
        _LOG.info("%s: skipping the mtp tensors (%s)", checkpoint.folder, skipped)
    return load_found(checkpoint, config, found, device_of, progress)


def load_found(
    checkpoint: Checkpoint,
    config: ModelConfig,
    found: Sequence[StoredParameter],
    device_of: Callable[[str], torch.device],
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """``load_weights`` of some of the parameters that ``find_parameters`` gives."""
    devices = {stored.parameter.name: device_of(stored.parameter.name) for stored in found}
    count = _counter(progress, sum(stored.nbytes for stored in found))
    plain = [stored for stored in found if stored.format is None]
    matrices = [stored for stored in found if stored.format is not None]
    weights: Weights = {}
    problems = Problems()
    # Small tensors first: a wrong value in them shows before the long part of the load.
    for stored in plain:
        name = stored.parameter.name
        weights[name] = _load_plain(
            checkpoint, stored, devices[name], config.n_routed_experts, problems
        )
        count(stored.nbytes)
    _check_input_scales(checkpoint, matrices, problems)
    problems.raise_if_any(str(checkpoint.folder))
    pieces: defaultdict[torch.device, list[Piece]] = defaultdict(list)
    for stored in matrices:
        name = stored.parameter.name
        weights[name], needed = _unfilled_matrix(checkpoint, stored, devices[name])
        pieces[devices[name]] += needed
    transfer(pieces, count)
    for stored in matrices:
        weight = weights[stored.parameter.name]
        assert isinstance(weight, QuantTensor)
        _check_scales(checkpoint, stored, weight)
    return {name: weights[name] for name in devices}


def load_matrix(
    checkpoint: Checkpoint, stored: StoredParameter, device: torch.device, expert: int | None = None
) -> QuantTensor:
    """One LINEAR, EXPERT or FLOOR parameter on ``device``, or only one ``expert`` of it (without
    the stack dimension).

    Raises ``UserError`` for scales out of range.
    """
    weight, pieces = _unfilled_matrix(checkpoint, stored, device, expert)
    transfer({device: pieces}, lambda _: None)
    _check_scales(checkpoint, stored, weight, expert or 0)
    return weight


def _counter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Adds up the bytes that the threads of a load report, and shows them one at a time."""
    lock = Lock()
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, total)

    return count


def _unfilled_matrix(
    checkpoint: Checkpoint, stored: StoredParameter, device: torch.device, expert: int | None = None
) -> tuple[QuantTensor, list[Piece]]:
    """A matrix, or one ``expert`` of it, with empty memory, and the pieces of the files that fill
    it.
    """
    format = stored.format
    shape = stored.parameter.shape
    assert format is not None
    count = shape[0] if stored.parameter.role is Role.EXPERT else 1
    experts = range(count)
    if expert is not None:
        experts = range(expert, expert + 1)
        shape = shape[1:]
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    for name, part_shape in packed_shapes(format, shape).items():
        if part_shape is not None:
            part = stored.parts[name]
            tensors[name] = torch.empty(
                part_shape, dtype=_loaded_dtype(format, name, part), device=device
            )
            # Bytes only: a conversion of E8M0 would destroy the scales (model.md#codes-and-scales).
            rows = tensors[name].view(-1).view(torch.uint8).view(len(experts), -1).unbind()
            for index, row in zip(experts, rows, strict=True):
                pieces.append(Piece(*_byte_range(checkpoint, part, index, count), row))
    weight = QuantTensor(
        tensors["data"], tensors.get("block_scale"), tensors.get("global_scale"), format, shape
    )
    return weight, pieces


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
    return torch.float8_e8m0fnu if format is QuantFormat.MXFP4 else part.dtype


def _check_scales(
    checkpoint: Checkpoint, stored: StoredParameter, weight: QuantTensor, first_expert: int = 0
) -> None:
    """Raises ``UserError`` for the first scale that is no finite number above 0, or so large that
    it was an exponent.
    """
    if weight.global_scale is not None:
        names = stored.parts["global_scale"].names[first_expert:]
        for name, value in zip(names, weight.global_scale.reshape(-1).tolist(), strict=False):
            if not 0.0 < value < math.inf:
                raise UserError(
                    f"{checkpoint.folder}: {name}: found {value}, expected a finite number above 0"
                )
    if weight.block_scale is None or weight.format is QuantFormat.NVFP4:
        return
    part = stored.parts["block_scale"]
    names = part.names if part.fused else part.names[first_expert:]
    groups = weight.block_scale.view(1 if part.fused else math.prod(weight.shape[:-2]), -1)
    for name, (least, most) in zip(names, _extremes(groups), strict=False):
        if not (least >= 0.0 and most <= _LARGEST_BLOCK_SCALE):
            found = least if least < 0.0 else most
            expected = f"0 to {_LARGEST_BLOCK_SCALE:g}: E8M0 bytes are exponents, not numbers"
            raise UserError(f"{checkpoint.folder}: {name}: found {found:g}, expected {expected}")


def _extremes(scale_NB: Tensor) -> list[tuple[float, float]]:
    """The least and the largest scale of every row; NaN where there is one."""
    if scale_NB.dtype != torch.float8_e8m0fnu:
        least, most = scale_NB.aminmax(dim=1)
        return list(zip(least.tolist(), most.tolist(), strict=True))
    codes = scale_NB.view(torch.uint8).amax(1).tolist()
    return [(0.0, math.nan if code == 255 else 2.0 ** (code - 127)) for code in codes]


def _check_input_scales(
    checkpoint: Checkpoint, matrices: list[StoredParameter], problems: Problems
) -> None:
    """Nothing here reads an ``input_scale``, but exports pass it on."""
    names = [
        name
        for stored in matrices
        if "input_scale" in stored.parts
        for name in stored.parts["input_scale"].names
    ]
    values = torch.empty(len(names), dtype=torch.float32)
    tensors = [checkpoint.tensors[name] for name in names]
    rows = values.view(torch.uint8).view(-1, values.itemsize)
    pieces = [
        Piece(tensor.file, tensor.offset, row) for tensor, row in zip(tensors, rows, strict=True)
    ]
    transfer({values.device: pieces}, lambda _: None)
    wrong = ~(values.isfinite() & (values >= 0))
    for index in wrong.nonzero().flatten().tolist():
        found = values[index].item()
        problems.add(
            "out of range", f"{names[index]} (found {found}, expected a finite number from 0)"
        )


def _load_plain(
    checkpoint: Checkpoint,
    stored: StoredParameter,
    device: torch.device,
    experts: int,
    problems: Problems,
) -> Tensor:
    (name,) = stored.parts["data"].names
    tensor = checkpoint.read(name)
    if stored.parameter.role is Role.TABLE:
        tensor = tensor.to(torch.int64)
        if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < experts):
            found = f"{int(tensor.min())} to {int(tensor.max())}"
            problems.add(
                "out of range", f"{name} (found expert ids {found}, expected 0 to {experts - 1})"
            )
        ids = tensor.sort(dim=-1).values
        repeated = (ids[:, 1:] == ids[:, :-1]).any(-1).nonzero()
        if len(repeated):
            problems.add(
                "out of range",
                f"{name} (found an expert twice for token {int(repeated[0])}, expected once)",
            )
    elif not bool(torch.isfinite(tensor).all()):
        problems.add("not finite", f"{name} (found NaN or infinity)")
    dtype = torch.float32 if stored.parameter.role is Role.FLOAT else tensor.dtype
    return tensor.to(device, dtype, copy=True)
