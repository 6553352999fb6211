"""Names of the values of a trace: their layers, their order, and which of them belong together."""

import math
import re
from collections.abc import Iterator, Sequence, Set

from dsv4.layers.values import LAYER_VALUES, OUTPUT_VALUES

# Ids whose order means nothing, and the values that belong to them.
CHOSEN = ("indexer.entries", "router.experts")
ALIGNED = {"indexer.scores": "indexer.entries", "router.weights": "router.experts"}
# Rows of these are entries, of all others tokens.
ENTRY_ROWS = ("attn.compressed", "indexer.keys")


def common_names(found: Set[str], reference: Set[str]) -> list[str]:
    """The values that both sides have, with their ids where they belong to some, in the order of
    execution.
    """
    both = found & reference
    return [name for name in sorted(both, key=execution_order) if ids_of(name) in (None, *both)]


def execution_order(name: str) -> tuple[float, int, str]:
    """Sorts names of values as they are computed; unknown ones of a layer come at its end."""
    layer = layer_of(name)
    if layer is None:
        return math.inf, _place(name, OUTPUT_VALUES), name
    return layer, _place(suffix(name), LAYER_VALUES), name


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def layer_of(name: str) -> int | None:
    """3 of ``layers.3.attn.q``; None for what belongs to no layer."""
    match = re.match(r"layers\.(0|[1-9][0-9]{0,8})\.", name)
    return None if match is None else int(match[1])


def column_of(name: str) -> str:
    """The column of a plot that a value stands in: its layer, or itself."""
    layer = layer_of(name)
    return name if layer is None else f"layer {layer}"


def suffix(name: str) -> str:
    """``attn.q`` of ``layers.3.attn.q``; all of what belongs to no layer."""
    layer = layer_of(name)
    return name if layer is None else name.removeprefix(f"layers.{layer}.")


def ids_of(name: str) -> str | None:
    """The name of the ids that a value's columns belong to, if they do."""
    last = suffix(name)
    return name.removesuffix(last) + ALIGNED[last] if last in ALIGNED else None


def one_sided(
    only_ours: Sequence[str], only_theirs: Sequence[str], compared: Sequence[str]
) -> Iterator[str]:
    """Lines with the values that were not ``compared`` because only one side has them."""
    for side, names in (("ours", only_ours), ("theirs", only_theirs)):
        if names:
            folded = ", ".join(_layers_folded(names, compared))
            yield f"only in {side}, or without its ids: {folded}"


def _layers_folded(names: Sequence[str], compared: Sequence[str]) -> list[str]:
    """The names in few words: ``layers.3-5.*`` for all of layers in which nothing was compared,
    ``layers.*.attn.q`` for a value that was compared in no layer, else ``layers.3-5.attn.q``.
    """
    compared_layers = {layer_of(name) for name in compared}
    compared_values = {suffix(name) for name in compared}
    places: dict[tuple[str, bool], list[int]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is None:
            places[name, False] = []
        elif layer not in compared_layers:
            places.setdefault(("*", True), []).append(layer)
        elif suffix(name) not in compared_values:
            places[f"layers.*.{suffix(name)}", False] = []
        else:
            places.setdefault((suffix(name), True), []).append(layer)
    return [
        f"layers.{_ranges({*layers})}.{text}" if in_some else text
        for (text, in_some), layers in places.items()
    ]


def _ranges(numbers: Set[int]) -> str:
    """``0,3-5`` of 0, 3, 4 and 5."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    stops = sorted(number for number in numbers if number + 1 not in numbers)
    pairs = zip(starts, stops, strict=True)
    return ",".join(str(start) if start == stop else f"{start}-{stop}" for start, stop in pairs)
