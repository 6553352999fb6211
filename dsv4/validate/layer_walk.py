"""Both sides of a comparison layer by layer: each layer is loaded, given streams and dropped."""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from dsv4.checkpoint.layer_weights import LayerSource
from dsv4.config import KIND_OF_RATIO, ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.layers.values import value_names
from dsv4.ops.tables import DirectTable, Table
from dsv4.validate.against import expect_shape, expect_shape_of_choices
from dsv4.validate.agreement import Agreement, RowComparison, align
from dsv4.validate.followed_choices import ENTRIES, EXPERTS, FollowedChoices
from dsv4.validate.joined_trace import JoinedTrace
from dsv4.validate.layer_shapes import layer_shape
from dsv4.validate.names import (
    CHOSEN,
    common_names,
    execution_order,
    ids_of,
    layer_of,
    suffix,
)
from dsv4.validate.one_layer import Given, OneLayer, Values

Input = Literal["own", "reference", "trace"]


class Computed(NamedTuple):
    """The values of a layer; ``choices``: the experts and entries that this side would have chosen,
    where it followed those of the other one; ``only_theirs``: names of values that the other side
    lacks.
    """

    values: Values
    choices: Values
    only_theirs: Sequence[str] = ()


class Reference(Protocol):
    """The other side."""

    def choices(self, layer: int) -> Values:
        """The experts and entries of a layer that torch ops are to follow, by name; none: it
        follows them, or they are not known.
        """
        ...

    def run(self, layer: int, given: Given, found: Values, chunk: int) -> Computed:
        """The values of a layer on what it is given; ``found``: those of this engine, computed with
        ``chunk`` tokens per step.
        """
        ...


@dataclass(frozen=True)
class EngineLayers:
    """Layers as an engine of some configuration computes them, layer l on device l mod N."""

    source: LayerSource
    engine: EngineConfig
    table: Table
    devices: Sequence[torch.device]

    def load(self, layer: int) -> OneLayer:
        """The layer on its device."""
        device = self.devices[layer % len(self.devices)]
        return OneLayer.load(self.source, layer, self.engine, self.table, device)


@dataclass(frozen=True)
class TorchReference:
    """The torch ops. They follow the choices of the engine, whose router and indexer are compared
    apart. ``chunk``: tokens per step; None: as many as the engine, for activations that are
    rounded by the length of a step.
    """

    layers: EngineLayers
    chunk: int | None

    def choices(self, layer: int) -> Values:
        """See ``Reference``."""
        return {}

    def run(self, layer: int, given: Given, found: Values, chunk: int) -> Computed:
        """See ``Reference``."""
        return _run_following(self.layers.load(layer), layer, given, found, self.chunk or chunk)


@dataclass(frozen=True)
class TraceReference:
    """The layers of a trace, which has what ``expect_values_of`` asks for."""

    trace: JoinedTrace

    def choices(self, layer: int) -> Values:
        """See ``Reference``."""
        names = [f"layers.{layer}.{name}" for name in (EXPERTS, ENTRIES)]
        return {name: whole_value(self.trace, name) for name in names if name in self.trace.names}

    def run(self, layer: int, given: Given, found: Values, chunk: int) -> Computed:
        """See ``Reference``."""
        theirs = {name for name in self.trace.names if layer_of(name) == layer}
        names = common_names(theirs, found.keys())
        only_theirs = sorted(theirs - {*names}, key=execution_order)
        return Computed({name: whole_value(self.trace, name) for name in names}, {}, only_theirs)


class LayerResult(NamedTuple):
    """The comparison of a layer run with ``chunk`` tokens per step: a row for every value, and the
    names of those that only one side has.
    """

    layer: int
    kind: str
    chunk: int
    seconds: float
    rows: Sequence[Agreement]
    only_ours: Sequence[str]
    only_theirs: Sequence[str]


@dataclass(frozen=True)
class Walk:
    """What is compared.

    ``input``: a layer reads the streams that the engine ("own") or the reference left behind the
    layer before, or with "trace" those that entered it in ``trace``. Without a trace the first one
    reads the embedded tokens if it is layer 0, else random streams. ``traces``: all that are read,
    which gather what their ranks do not have in common as they should. ``dtype``: of these streams;
    both sides hold it exactly. ``threshold`` is that of a token, ``choices`` the least share of
    experts and entries, over all tokens, that the reference chooses too.
    """

    found: EngineLayers
    reference: Reference
    layers: range
    chunks: Sequence[int]
    token_ids: Sequence[int]
    position: int
    input: Input
    trace: JoinedTrace | None
    traces: Sequence[JoinedTrace]
    dtype: torch.dtype
    seed: int
    threshold: float
    choices: float

    def __iter__(self) -> Iterator[LayerResult]:
        """Layer by layer, and of each chunk by chunk; only streams are kept between two layers.
        The last chunk's are what the next layer reads.
        """
        left: Values | None = None
        for layer in self.layers:
            streams_TME = self._entering(layer, left)
            given = Given(list(self.token_ids), streams_TME.to(self.dtype), self.position)
            loaded = self.found.load(layer)
            kind = kind_of(self.found.source.config, layer)
            choices = self.reference.choices(layer)
            for chunk in self.chunks:
                started = time.perf_counter()
                own = _run(loaded, layer, given, choices, chunk)
                expected = self.reference.run(layer, given, own.values, chunk)
                rows = self._compare(kind, own, expected)
                seconds = time.perf_counter() - started
                compared = {row.name for row in rows}
                only_ours = sorted(own.values.keys() - compared, key=execution_order)
                sides = (only_ours, expected.only_theirs)
                yield LayerResult(layer, kind, chunk, seconds, rows, *sides)
                left = own.values if self.input != "reference" else expected.values

    def _compare(self, kind: str, own: Computed, expected: Computed) -> list[Agreement]:
        rows = []
        found = own.values
        theirs = expected.values
        for name in common_names(found.keys(), theirs.keys()):
            ids = ids_of(name)
            is_choice = suffix(name) in CHOSEN
            # A share over all tokens under ``choices`` has a token under it.
            comparison = RowComparison(self.choices if is_choice else self.threshold)
            if is_choice:
                sides = (side.choices.get(name, side.values[name]) for side in (own, expected))
                comparison.add_chosen(*sides)
            elif ids is not None:
                comparison.add(*align(found[name], found[ids], theirs[name], theirs[ids]))
            else:
                comparison.add(found[name], theirs[name])
            row = comparison.result(name, kind, is_choice)
            if is_choice and row.cosine >= self.choices:
                row = replace(row, first_under=None, under=0)
            rows.append(row)
        return rows

    def _entering(self, layer: int, left: Values | None) -> Tensor:
        """The streams that enter a layer; ``left``: what the layer before it left."""
        if self.trace is not None and self.input == "trace":
            return whole_value(self.trace, _name_of_streams_into(self.trace, layer))
        return self._first() if left is None else left[f"layers.{layer - 1}.streams"]

    def _first(self) -> Tensor:
        shape = self._shape()
        if self.layers.start == 0:
            return self.found.source.embedding(self.token_ids)[:, None].expand(shape)
        return torch.randn(shape, generator=Generator().manual_seed(self.seed))

    def _shape(self) -> tuple[int, int, int]:
        """Of the streams."""
        config = self.found.source.config
        return len(self.token_ids), config.hc_mult, config.hidden_size


def _run(loaded: OneLayer, layer: int, given: Given, choices: Values, chunk: int) -> Computed:
    """Recorded ops follow nobody."""
    if choices and isinstance(loaded.table, DirectTable):
        return _run_following(loaded, layer, given, choices, chunk)
    return Computed(loaded.run(given, chunk), {})


def _run_following(
    loaded: OneLayer, layer: int, given: Given, choices: Values, chunk: int
) -> Computed:
    """Torch ops that follow the experts and entries among ``choices``."""
    assert isinstance(loaded.table, DirectTable)
    prefix = f"layers.{layer}."
    theirs = choices.get(prefix + EXPERTS), choices.get(prefix + ENTRIES)
    followed = FollowedChoices(*theirs, loaded.table.ops)
    following = replace(loaded, table=DirectTable(loaded.table.packing, followed.ops))
    values = following.run(given, chunk)
    return Computed(values, {prefix + name: ids for name, ids in followed.own().items()})


def expect_values_of(trace: JoinedTrace, layers: range, config: ModelConfig) -> None:
    """Raises ``UserError`` when the trace has no value or no row of one of the layers, and for a
    value of another shape than that of this engine.
    """
    common = common_names({*value_names(config)}, trace.names)
    for layer in layers:
        names = [name for name in common if layer_of(name) == layer]
        if not names:
            raise UserError(f"{trace.path}: found no value of layer {layer}")
        for name in names:
            _expect_own_shape(name, trace, config)
            expect_shape_of_choices(name, trace)
        if not any(trace.shape(name)[0] for name in names):
            raise UserError(f"{trace.path}: found no row of layer {layer}")


def expect_streams_into(trace: JoinedTrace, layers: range, config: ModelConfig) -> None:
    """Raises ``UserError`` when the trace lacks the streams that entered one of the layers, or has
    others than ``[T, M, E]``.
    """
    for layer in layers:
        _expect_own_shape(_name_of_streams_into(trace, layer), trace, config)


def _expect_own_shape(name: str, trace: JoinedTrace, config: ModelConfig) -> None:
    own = layer_shape(config, name, len(trace.token_ids))
    expect_shape(name, trace, own, "this engine")


def _name_of_streams_into(trace: JoinedTrace, layer: int) -> str:
    names = [f"layers.{layer}.attn_hc.streams"]
    if layer > 0:
        names.append(f"layers.{layer - 1}.streams")
    for name in names:
        if name in trace.names:
            return name
    raise UserError(
        f"{trace.path}: found no streams that enter layer {layer}, expected {' or '.join(names)}"
    )


def whole_value(trace: JoinedTrace, name: str) -> Tensor:
    """All rows of a value."""
    return trace.rows(name, 0, trace.shape(name)[0])


def kind_of(config: ModelConfig, layer: int) -> str:
    """SWA, CSA or HCA, and whether its router is hashed."""
    kind = KIND_OF_RATIO[config.compress_ratios[layer]]
    return f"{kind} hash" if config.hash_layers[layer] else kind


def peak_bytes() -> Mapping[str, int]:
    """The most memory that the process held so far, by "host" and device."""
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
    for index in range(torch.cuda.device_count()):
        peaks[f"cuda:{index}"] = torch.cuda.max_memory_allocated(index)
    return peaks
