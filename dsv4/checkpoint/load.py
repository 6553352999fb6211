"""Loads the parameters of a config from a checkpoint: streamed tensor by tensor, bytes as stored."""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.formats import Part, StoredParameter, find_parameters, mtp_kind
from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.problems import Problems
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.parameters import MtpKind, Parameter, Role
from dsv4.quant import QuantFormat, QuantTensor, packed_shapes

Weights = dict[str, QuantTensor | Tensor]

_LOG = logging.getLogger("dsv4")


class ParameterDescription(NamedTuple):
    """What a parameter will cost once loaded; ``format`` is None for NORM, FLOAT and TABLE."""

    parameter: Parameter
    format: QuantFormat | None
    nbytes: int


def describe(checkpoint: Checkpoint, config: ModelConfig, mtp: MtpKind | None = None) -> list[ParameterDescription]:
    """Format and device bytes of every parameter, from names and headers alone. Raises like ``load_weights``."""
    found = find_parameters(checkpoint, config, mtp)
    return [ParameterDescription(stored.parameter, stored.format, stored.nbytes) for stored in found]


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device_of: Callable[[str], torch.device],
    mtp: MtpKind | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """All parameters by canonical name, each on ``device_of(name)``.

    LINEAR, EXPERT (stacked) and FLOOR become ``QuantTensor``s of the stored bytes; NORM a bfloat16 or float32 vector as
    stored; FLOAT float32; TABLE int64. Extra memory is one tensor of the files, memory-mapped. ``progress`` is called
    with (bytes done, bytes in all) after every parameter. Raises one ``UserError`` with everything that does not fit,
    before anything is loaded; and one for what only the values show: NaN or infinity in small tensors, expert ids or
    global scales out of range.
    """
    found = find_parameters(checkpoint, config, mtp)
    skipped = mtp_kind(checkpoint)
    if skipped is not None and mtp is None:
        _LOG.info("%s: skipping the mtp tensors (%s)", checkpoint.folder, skipped)
    total, done = sum(stored.nbytes for stored in found), 0
    weights: Weights = {}
    problems = Problems()
    # Small tensors first: a wrong value in them shows before the long part of the load.
    small = [stored for stored in found if stored.format is None]
    for stored in small + [stored for stored in found if stored.format is not None]:
        name = stored.parameter.name
        if stored.format is None:
            weights[name] = _load_plain(checkpoint, stored, device_of(name), config.n_routed_experts, problems)
        else:
            problems.raise_if_any(str(checkpoint.folder))
            weights[name] = load_matrix(checkpoint, stored, device_of(name))
        done += stored.nbytes
        if progress is not None:
            progress(done, total)
    return {stored.parameter.name: weights[stored.parameter.name] for stored in found}


def load_matrix(
    checkpoint: Checkpoint, stored: StoredParameter, device: torch.device, expert: int | None = None
) -> QuantTensor:
    """One LINEAR, EXPERT or FLOOR parameter on ``device``, or only one ``expert`` of it (without the stack dimension).

    Raises ``UserError`` for a global scale that is not a finite number above 0.
    """
    format, shape = stored.format, stored.parameter.shape
    assert format is not None
    experts = range(shape[0]) if stored.parameter.role is Role.EXPERT else range(1)
    if expert is not None:
        experts, shape = range(expert, expert + 1), shape[1:]
    tensors: dict[str, Tensor] = {}
    for name, part_shape in packed_shapes(format, shape).items():
        if part_shape is not None:
            # Bytes only: a numeric conversion of E8M0 would destroy the scales (spec §7.1).
            rows = _load_rows(checkpoint, stored, stored.parts[name], experts, device)
            tensors[name] = rows.view(_loaded_dtype(format, name, stored.parts[name])).view(part_shape)
    if format is QuantFormat.NVFP4:
        _check_global_scale(checkpoint, stored, experts)
    return QuantTensor(tensors["data"], tensors.get("block_scale"), tensors.get("global_scale"), format, shape)


def _load_rows(
    checkpoint: Checkpoint, stored: StoredParameter, part: Part, experts: range, device: torch.device
) -> Tensor:
    """The bytes of ``experts`` one after the other, uint8 ``[bytes]``: allocated once, filled tensor by tensor."""
    target = None
    for slot, expert in enumerate(experts):
        source = stored_bytes(checkpoint, part, expert, stored.parameter.shape[0])
        if target is None:
            target = torch.empty(len(experts) * source.numel(), dtype=torch.uint8, device=device)
        target[slot * source.numel() : (slot + 1) * source.numel()].copy_(source)
    assert target is not None
    return target


def stored_bytes(checkpoint: Checkpoint, part: Part, expert: int, experts: int) -> Tensor:
    """Bytes of one of ``experts`` in a part, memory-mapped uint8 ``[bytes]``; a plain matrix is expert 0 of 1."""
    if not part.fused:
        return checkpoint.read(part.names[expert]).reshape(-1).view(torch.uint8)
    rows = checkpoint.read(part.names[0]).reshape(-1).view(torch.uint8).view(experts, -1)[expert]
    return rows if part.half is None else rows.view(2, -1)[part.half]


def _loaded_dtype(format: QuantFormat, name: str, part: Part) -> torch.dtype:
    if name == "data" and format in (QuantFormat.NVFP4, QuantFormat.MXFP4):
        return torch.uint8
    return torch.float8_e8m0fnu if format is QuantFormat.MXFP4 else part.dtype


def _check_global_scale(checkpoint: Checkpoint, stored: StoredParameter, experts: range) -> None:
    part = stored.parts["global_scale"]
    for name in (part.names[expert] for expert in experts):
        value = float(checkpoint.read(name))
        if not 0.0 < value < math.inf:
            raise UserError(f"{checkpoint.folder}: {name}: found {value}, expected a finite number above 0")


def _load_plain(
    checkpoint: Checkpoint, stored: StoredParameter, device: torch.device, experts: int, problems: Problems
) -> Tensor:
    (name,) = stored.parts["data"].names
    tensor = checkpoint.read(name)
    if stored.parameter.role is Role.TABLE:
        tensor = tensor.to(torch.int64)
        if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < experts):
            found = f"{int(tensor.min())} to {int(tensor.max())}"
            problems.add("out of range", f"{name} (found expert ids {found}, expected 0 to {experts - 1})")
    elif not bool(torch.isfinite(tensor).all()):
        problems.add("not finite", f"{name} (found NaN or infinity)")
    dtype = torch.float32 if stored.parameter.role is Role.FLOAT else tensor.dtype
    return tensor.to(device, dtype, copy=True)
