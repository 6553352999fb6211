"""``dsv4.validate.cosine --against``: a trace of this engine with somebody else's, value by value
in the order of execution (docs/validation.md).
"""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dsv4.config import KIND_OF_RATIO, ModelConfig
from dsv4.config_dialects import compress_ratios
from dsv4.errors import UserError, shorten
from dsv4.json_object import JsonReader
from dsv4.layers.values import value_names
from dsv4.validate.agreement import Agreement, RowComparison, align, table
from dsv4.validate.joined_trace import (
    JoinedTrace,
    Unequal,
    expect_same_tokens,
    expect_tokens_of,
    unequal_lines,
)
from dsv4.validate.names import (
    ALIGNED,
    CHOSEN,
    ENTRY_ROWS,
    common_names,
    execution_order,
    ids_of,
    layer_of,
    one_sided,
    suffix,
)
from dsv4.validate.trace_file import slices

# Writes a trace of the engine to a file: on these tokens, with the values of these names.
WriteTrace = Callable[[list[int], Sequence[str], Path], None]


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of execution; names that only one side has, or that cannot be compared
    without ids of one that it lacks; values that ranks do not have in common as they should.
    """

    rows: list[Agreement]
    only_ours: list[str]
    only_theirs: list[str]
    unequal: dict[str, Unequal]

    @property
    def first(self) -> Agreement | None:
        """The first value that leaves the threshold."""
        return next((row for row in self.rows if not row.passes), None)

    @property
    def passes(self) -> bool:
        return self.first is None and not self.unequal

    def text(self) -> str:
        """The table and what else there is to say."""
        return "\n".join([table(self.rows), *self._lines()])

    def facts(self) -> dict[str, Any]:
        """What the JSON file holds."""
        first = self.first
        return {
            "first": None if first is None else {"name": first.name, "row": first.first_under},
            "only_ours": self.only_ours,
            "only_theirs": self.only_theirs,
            "unequal": {name: value._asdict() for name, value in self.unequal.items()},
            "rows": [asdict(row) for row in self.rows],
        }

    def _lines(self) -> Iterator[str]:
        yield from one_sided(self.only_ours, self.only_theirs, [row.name for row in self.rows])
        yield from unequal_lines(self.unequal)
        if self.first is None:
            besides = ", but ranks differ" if self.unequal else ""
            yield f"every value is above the threshold{besides}"
        else:
            yield from _first_lines(self.first, self.rows)


def _first_lines(first: Agreement, rows: Sequence[Agreement]) -> Iterator[str]:
    """The first value under the threshold, and the first one in most tokens where it is another:
    rounding may decide near ties of single tokens before a fault shows.
    """
    most = next((row for row in rows if row.fails_in_most), first)
    if most.factor is not None:
        yield f"{most.name}: ours is {most.factor:.4g} times theirs"
    if most is not first:
        yield f"first in most of its rows: {_name_and_kind(most)}, {most.under} of {most.compared}"
    what = "entry" if suffix(first.name) in ENTRY_ROWS else "token"
    yield f"first under the threshold: {_name_and_kind(first)}, {what} {first.first_under}"


def _name_and_kind(row: Agreement) -> str:
    return f"{row.name} ({row.kind})" if row.kind else row.name


def compare_files(
    theirs: Sequence[Path], ours: Path | None, model: Path, write: WriteTrace, threshold: float
) -> Comparison:
    """Their trace, given as the files of its ranks, with ours, which ``write`` makes of the
    checkpoint ``model`` when there is none yet. Raises ``UserError`` for files that do not fit
    together, and before ``write`` for tokens and values that do not fit to the checkpoint.
    """
    with ExitStack() as stack:
        reference = JoinedTrace(theirs, stack)
        unwritten: Sequence[str] = ()
        if ours is None:
            config = ModelConfig.from_folder(model)
            expect_tokens_of(reference, config)
            unwritten = value_names(config)
            names = _expect_common({*unwritten}, reference)
            # Errors name it.
            ours = Path(stack.enter_context(TemporaryDirectory())) / "the trace of --model"
            write(reference.token_ids, names, ours)
        found = JoinedTrace([ours], stack)
        expect_same_tokens(reference, found)
        return compare_traces(found, reference, threshold, unwritten)


def compare_traces(
    found: JoinedTrace, reference: JoinedTrace, threshold: float, unwritten: Sequence[str]
) -> Comparison:
    """Every value that both traces have; one slice of tokens is in memory at a time. ``unwritten``:
    what our side has besides the values in its file. Raises ``UserError`` when nothing is in both
    or all of it is without rows, and for shapes that do not fit together.
    """
    kinds = _kinds(found) or _kinds(reference)
    names = _expect_common(found.names, reference)
    for name in names:
        expect_shape(name, reference, found.shape(name), found.path.name)
        expect_shape_of_choices(name, found)
        expect_shape_of_choices(name, reference)
    if not any(found.shape(name)[0] for name in names):
        raise UserError(f"{reference.path}: found no row of values that both traces have")
    rows = [
        _compare_value(name, kinds.get(layer_of(name), ""), found, reference, threshold)
        for name in names
    ]
    return Comparison(
        rows,
        sorted({*found.names, *unwritten} - {*names}, key=execution_order),
        sorted(reference.names - {*names}, key=execution_order),
        {**found.unequal, **reference.unequal},
    )


def _expect_common(found: Set[str], reference: JoinedTrace) -> list[str]:
    names = common_names(found, reference.names)
    if not names:
        hint = ""
        if found and reference.names and not found & reference.names:
            ours = min(found, key=execution_order)
            hint = f", {shorten(min(reference.names))} but no name as {ours!r} (docs/traces.md)"
        raise UserError(f"{reference.path}: found no value that both traces have{hint}")
    return names


def expect_shape(name: str, trace: JoinedTrace, shape: list[int], source: str) -> None:
    """Raises ``UserError`` when a value of ``trace`` has another shape than ``source``, which has
    ``shape``. Ids may differ in how many there are for a token.
    """
    found = trace.shape(name)
    by_id = suffix(name) in (*CHOSEN, *ALIGNED)
    where = f"{trace.path}: {name}"
    if found != shape and math.prod(found) == math.prod(shape) and not by_id:
        hint = "transpose or reshape it where it is written"
        raise UserError(f"{where}: found {found}, expected {shape} as in {source}; {hint}")
    if found[0] != shape[0]:
        expected = f"{shape[0]} rows as in {source}"
        raise UserError(f"{where}: found {found[0]}, expected {expected}")
    if (len(found), by_id or found) != (len(shape), by_id or shape):
        expected = f"{shape} as in {source}"
        raise UserError(f"{where}: found {found}{trace.join_note(name)}, expected {expected}")


def expect_shape_of_choices(name: str, trace: JoinedTrace) -> None:
    """Raises ``UserError`` for ids that are no integers ``[T, K]``, and for values that have not as
    many columns as their ids, which ``trace`` has too.
    """
    shape = trace.shape(name)
    ids = ids_of(name)
    if suffix(name) in CHOSEN and len(shape) != 2:
        raise UserError(f"{trace.path}: {name}: found {shape}, expected [T, K]")
    if suffix(name) in CHOSEN and trace.dtype(name)[0] not in "IU":
        raise UserError(f"{trace.path}: {name}: found {trace.dtype(name)}, expected integers")
    if ids is not None and shape != trace.shape(ids):
        expected = f"{trace.shape(ids)} as {suffix(ids)} has"
        raise UserError(f"{trace.path}: {name}: found {shape}, expected {expected}")


def _compare_value(
    name: str, kind: str, found: JoinedTrace, reference: JoinedTrace, threshold: float
) -> Agreement:
    chosen = suffix(name) in CHOSEN
    ids = ids_of(name)
    comparison = RowComparison(threshold)
    rows, *width = found.shape(name)
    for start, stop in slices(rows, math.prod(width)):
        a = found.rows(name, start, stop)
        b = reference.rows(name, start, stop)
        if chosen:
            comparison.add_chosen(a, b)
        elif ids is None:
            comparison.add(a, b)
        else:
            other_ids = reference.rows(ids, start, stop)
            comparison.add(*align(a, found.rows(ids, start, stop), b, other_ids))
    return comparison.result(name, kind, chosen)


def _kinds(trace: JoinedTrace) -> dict[int | None, str]:
    """Kinds of layers by the trace's configuration. They are labels: none without one."""
    layers = trace.config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return {}
    ratios = compress_ratios(JsonReader(trace.config, f"{trace.path}: config"), layers)
    return {layer: KIND_OF_RATIO[ratio] for layer, ratio in enumerate(ratios)}
