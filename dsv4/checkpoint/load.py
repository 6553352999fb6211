"""Loads the parameters of a config from a checkpoint, bytes as stored, straight to the devices that
own them.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.byte_count import counter
from dsv4.checkpoint.declarations import DENSE
from dsv4.checkpoint.drafts import mtp_kind
from dsv4.checkpoint.finite import check_finite
from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.matrices import Held, unfilled_matrices
from dsv4.checkpoint.pieces import Piece
from dsv4.checkpoint.plain import load_plain
from dsv4.checkpoint.scale_values import (
    check_input_scales,
    check_scales,
    unfilled_input_scales,
)
from dsv4.checkpoint.stored_parameters import StoredParameter, find_parameters
from dsv4.checkpoint.transfer import Transfer
from dsv4.checkpoint.uncollected import uncollected
from dsv4.config import ModelConfig
from dsv4.parallel.placement import Placement
from dsv4.parallel.sharding import check_divisible, cut_of, local_parameter
from dsv4.progress import Progress
from dsv4.weights.parameters import MtpKind, Parameter
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_bytes

Weights = dict[str, QuantTensor | Tensor]

_LOG = logging.getLogger("dsv4")


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
    return descriptions(find_parameters(checkpoint, config, mtp))


def descriptions(found: Iterable[StoredParameter]) -> list[ParameterDescription]:
    """Format and bytes of ``found`` parameters."""
    return [
        ParameterDescription(stored.parameter, stored.format, stored.nbytes) for stored in found
    ]


def held_by(
    stored: Iterable[ParameterDescription], ranks: int, rank: int
) -> list[ParameterDescription]:
    """What ``rank`` of ``ranks`` holds of all (whole) ``stored`` parameters."""
    return [_held(one, ranks, rank) for one in stored]


def _held(whole: ParameterDescription, ranks: int, rank: int) -> ParameterDescription:
    parameter, format, nbytes = whole
    local = local_parameter(parameter, ranks, rank)
    values = math.prod(parameter.shape)
    if format is None or format in DENSE:
        return ParameterDescription(local, format, nbytes // values * math.prod(local.shape))
    own = packed_bytes(format, local.shape)
    if format is QuantFormat.FP8_BLOCK128 and nbytes != packed_bytes(format, parameter.shape):
        # Block scales of 4 bytes, where packed_bytes counts 1.
        own += 3 * (own - math.prod(local.shape))
    return ParameterDescription(local, format, own)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device_of: Callable[[str], torch.device],
    mtp: MtpKind | None = None,
    progress: Progress | None = None,
) -> Weights:
    """All parameters by canonical name, each on ``device_of(name)``.

    LINEAR, EXPERT (stacked) and FLOOR become ``QuantTensor``s of the stored bytes; NORM a bfloat16
    or float32 vector as stored; FLOAT float32; TABLE int64. Several threads read matrices
    (``Transfer``); ``progress`` is called with (bytes done, bytes in all), by one thread at a time.
    Raises one ``UserError`` with everything that does not fit, before anything is loaded; and one
    for what only the values show: NaN or infinity, expert ids or scales out of range; and for a
    file that is replaced or written to meanwhile.
    """
    found = find_parameters(checkpoint, config, mtp)
    _log_skipped(checkpoint, found)
    return load_found(checkpoint, config, found, device_of, progress)


class Loading(NamedTuple):
    """What each rank holds of all parameters, by canonical name. ``wait(name)`` returns when a
    parameter is there, on all ranks, and raises what ``load_weights`` raises of values.
    """

    ranks: tuple[Weights, ...]
    wait: Callable[[str], None]


def load_ranks(
    checkpoint: Checkpoint, config: ModelConfig, placement: Placement
) -> tuple[Weights, ...]:
    """What each rank of ``placement`` holds of all parameters (``dsv4.parallel.sharding``), by
    canonical name, on the rank's device; otherwise as ``load_weights``.

    Every byte of the files is read once. Raises ``UserError`` also for a model that cannot be cut
    for so many ranks.
    """
    with loading_ranks(checkpoint, config, placement) as loading:
        return loading.ranks


@contextmanager
def loading_ranks(
    checkpoint: Checkpoint,
    config: ModelConfig,
    placement: Placement,
    *,
    progress: Progress | None = None,
    found: Sequence[StoredParameter] | None = None,
    is_unneeded: Callable[[Parameter], bool] = lambda _: False,
) -> Iterator[Loading]:
    """``load_ranks`` beside the block of the ``with``, whose end waits for what is missing.
    ``progress``: as in ``load_weights``. ``found``: all parameters, where they are known. Those
    that ``is_unneeded`` picks are not loaded.
    """
    found = find_parameters(checkpoint, config) if found is None else found
    _log_skipped(checkpoint, found)
    needed = [stored for stored in found if not is_unneeded(stored.parameter)]
    formats = ((stored.parameter, stored.format) for stored in needed)
    check_divisible(config, formats, placement.ranks)
    devices_of = placement.devices_of
    with _loading(checkpoint, config, needed, devices_of, placement.ranks, progress) as loading:
        yield loading


def _log_skipped(checkpoint: Checkpoint, found: Sequence[StoredParameter]) -> None:
    """Says so where the checkpoint has a speculative module and ``found`` has nothing of it."""
    skipped = mtp_kind(checkpoint)
    if skipped is not None and not any(one.parameter.name.startswith("mtp.") for one in found):
        _LOG.info("%s: skipping the mtp tensors (%s)", checkpoint.folder, skipped)


def load_found(
    checkpoint: Checkpoint,
    config: ModelConfig,
    found: Sequence[StoredParameter],
    device_of: Callable[[str], torch.device],
    progress: Progress | None = None,
) -> Weights:
    """``load_weights`` of some of the parameters that ``find_parameters`` gives."""

    def devices_of(name: str) -> tuple[torch.device, ...]:
        return (device_of(name),)

    with _loading(checkpoint, config, found, devices_of, 1, progress) as loading:
        return loading.ranks[0]


def load_found_ranks(
    checkpoint: Checkpoint,
    config: ModelConfig,
    found: Sequence[StoredParameter],
    placement: Placement,
) -> tuple[Weights, ...]:
    """``load_ranks`` of some of the parameters that ``find_parameters`` gives."""
    devices_of = placement.devices_of
    with _loading(checkpoint, config, found, devices_of, placement.ranks, None) as loading:
        return loading.ranks


@contextmanager
def _loading(
    checkpoint: Checkpoint,
    config: ModelConfig,
    found: Sequence[StoredParameter],
    devices_of: Callable[[str], Sequence[torch.device]],
    ranks: int,
    progress: Progress | None,
) -> Iterator[Loading]:
    of_ranks, moving = _prepared(checkpoint, config, found, devices_of, ranks, progress)
    with moving:
        yield Loading(of_ranks, moving.wait)
    checkpoint.check_unchanged()


@uncollected()
def _prepared(
    checkpoint: Checkpoint,
    config: ModelConfig,
    found: Sequence[StoredParameter],
    devices_of: Callable[[str], Sequence[torch.device]],
    ranks: int,
    progress: Progress | None,
) -> tuple[tuple[Weights, ...], Transfer]:
    """What each rank holds, small tensors filled, and the transfer that fills the others."""
    held = {
        stored.parameter.name: [
            Held(device, cut_of(stored.parameter, ranks, rank))
            for rank, device in enumerate(devices_of(stored.parameter.name))
        ]
        for stored in found
    }
    count = counter(progress, sum(stored.nbytes + stored.input_scale_bytes for stored in found))
    # Small tensors first: a wrong value in them shows before the long part of the load.
    loaded: dict[str, Sequence[QuantTensor | Tensor]] = {
        **load_plain(checkpoint, found, config.n_routed_experts, held, count)
    }
    pieces: list[Piece] = []
    unchecked: dict[str, tuple[StoredParameter, Sequence[QuantTensor], Tensor]] = {}
    for stored in found:
        if stored.format is None:
            continue
        name = stored.parameter.name
        weights, of_weights = unfilled_matrices(checkpoint, stored, held[name])
        loaded[name] = weights
        first = held[name][0]
        input_scales, of_scales = unfilled_input_scales(checkpoint, stored, first.device)
        pieces += of_weights + of_scales
        # What is not cut is the same on all ranks.
        different = weights[:1] if first.cut is None else weights
        unchecked[name] = stored, different, input_scales

    def check(name: str) -> None:
        stored, weights, input_scales = unchecked.pop(name)
        for weight in weights:
            check_finite(checkpoint, stored, weight)
            check_scales(checkpoint, stored, weight)
        check_input_scales(checkpoint, stored, input_scales)

    of_ranks = tuple({name: loaded[name][rank] for name in held} for rank in range(ranks))
    return of_ranks, Transfer(pieces, count, check)
