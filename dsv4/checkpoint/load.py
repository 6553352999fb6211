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


def load_matrix(checkpoint: Checkpoint, stored: StoredParameter, device: torch.device) -> QuantTensor:
    """One LINEAR, EXPERT or FLOOR parameter on ``device``. Raises ``UserError`` for impossible global scales."""
    format, shape = stored.format, stored.parameter.shape
    assert format is not None
    tensors: dict[str, Tensor | None] = {}
    for name, part_shape in packed_shapes(format, shape).items():
        tensors[name] = None if part_shape is None else _load_part(checkpoint, stored.parts[name], part_shape, device)
    data, block_scale, global_scale = tensors["data"], tensors["block_scale"], tensors["global_scale"]
    assert data is not None
    if format is QuantFormat.MXFP4:
        assert block_scale is not None
        data, block_scale = data.view(torch.uint8), block_scale.view(torch.float8_e8m0fnu)
    elif format is QuantFormat.NVFP4:
        data = data.view(torch.uint8)
        assert global_scale is not None
        usable = (torch.isfinite(global_scale) & (global_scale > 0)).view(-1)
        if not bool(usable.all()):
            name = stored.parts["global_scale"].names[int(usable.int().argmin())]
            raise UserError(
                f"{checkpoint.folder}: {name}: found {float(checkpoint.read(name))}, expected a finite number above 0"
            )
    return QuantTensor(data, block_scale, global_scale, format, shape)


def _load_part(checkpoint: Checkpoint, part: Part, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Copies bytes only: a numeric conversion of E8M0 would destroy the scales (spec §7.1)."""
    target = torch.empty(math.prod(shape) * part.dtype.itemsize, dtype=torch.uint8, device=device)
    for slot, name in zip(target.view(len(part.names), -1), part.names, strict=True):
        source = checkpoint.read(name).reshape(-1).view(torch.uint8)
        if part.half is None:
            slot.copy_(source)
        else:
            slot.view(shape[0], -1).copy_(source.view(shape[0], 2, -1)[:, part.half])
    return target.view(part.dtype).view(shape)


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
