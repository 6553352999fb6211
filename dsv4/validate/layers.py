"""Validation of one layer at a time, for models that do not fit: ``python -m dsv4.validate.layers
--help``.

Loads a layer, runs it on this engine and on a reference with the same input, compares every named
value, drops the layer and goes on. The torch ops and transformers read and decode experts one at a
time. Ends with exit code 1 when a value is under the threshold, or ranks of a trace differ.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import isnan
from typing import Any

from dsv4.command.output_file import write_output
from dsv4.command.program import command, run_program
from dsv4.command.streams import show
from dsv4.measure.record_file import write_record
from dsv4.validate.joined_trace import unequal_lines
from dsv4.validate.layer_flags import described, make_walk, parse
from dsv4.validate.layer_walk import LayerResult, peak_bytes
from dsv4.validate.names import one_sided, suffix
from dsv4.validate.plot import Point, cosine_svg

_HEAD = f"{'layer':<5} {'kind':<9} {'chunk':>5}  {'streams':<10}  least of all values, choices"


def line(result: LayerResult) -> str:
    """A layer's worst token of the streams, the value with the worst token, the shares of choices,
    and what is under the threshold.
    """
    compared = [row for row in result.rows if row.worst_at is not None]
    values = [row for row in compared if row.relative_error is not None]
    shares = [row for row in compared if row.relative_error is None]
    # NaN is less than any number here.
    least = sorted(values, key=lambda row: (not isnan(row.worst_token), row.worst_token))[:1]
    streams = [row for row in values if suffix(row.name) == "streams"]
    worst = f"{streams[0].worst_token:.8f}" if streams else ""
    found = [f"{suffix(row.name)} {row.worst_token:.8f}" for row in least]
    found += [f"{suffix(row.name)} {row.cosine:.4f}" for row in shares]
    under = [suffix(row.name) for row in result.rows if not row.passes]
    mark = f"  under the threshold: {', '.join(under)}" if under else ""
    place = f"{result.layer:<5} {result.kind:<9} {result.chunk:>5}"
    return f"{place}  {worst:<10}  {', '.join(found)}{mark}"


def records(results: Sequence[LayerResult]) -> list[dict[str, Any]]:
    """The results as JSON objects."""
    return [
        {
            **result._asdict(),
            "seconds": round(result.seconds, 1),
            "rows": [asdict(row) for row in result.rows],
        }
        for result in results
    ]


def names_of_one_side(results: Sequence[LayerResult]) -> Iterator[str]:
    """Lines with the values that only one side has, of all layers."""
    ours = [name for result in results for name in result.only_ours]
    theirs = [name for result in results for name in result.only_theirs]
    return one_sided(ours, theirs, [row.name for result in results for row in result.rows])


def points(results: Sequence[LayerResult]) -> list[Point]:
    """A column for every layer and chunk; of choices the share over all tokens. Nothing of values
    of which no row was compared.
    """
    return [
        Point(
            f"layer {result.layer}, {result.chunk}",
            row.name,
            result.kind,
            row.cosine if row.relative_error is None else row.worst_token,
            row.cosine,
            row.passes,
        )
        for result in results
        for row in result.rows
        if row.worst_at is not None
    ]


def gigabytes(peaks: Mapping[str, int]) -> dict[str, float]:
    """Bytes in GB."""
    return {name: round(nbytes / 1e9, 2) for name, nbytes in peaks.items()}


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a value is under the threshold, or ranks of a trace differ."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments, __doc__)
    results: list[LayerResult] = []
    with ExitStack() as stack:
        walk = make_walk(options, stack)
        for result in walk:
            if not results:
                show(f"{_HEAD}\n")
            results.append(result)
            show(f"{line(result)}\n")
    unequal = {name: value for trace in walk.traces for name, value in trace.unequal.items()}
    for text in (*names_of_one_side(results), *unequal_lines(unequal)):
        print(text)
    memory = gigabytes(peak_bytes())
    print(f"peak memory: {', '.join(f'{name} {size} GB' for name, size in memory.items())}")
    record = {
        **described(options),
        "tokens": len(walk.token_ids),
        "context": walk.position,
        "peak_memory_gb": memory,
        "unequal": {name: value._asdict() for name, value in unequal.items()},
        "layers": records(results),
    }
    write_record(options.json, "dsv4.validate.layers", arguments, record)
    if options.svg is not None:
        write_output("--svg", options.svg, cosine_svg(points(results), options.threshold))
    passes = all(row.passes for result in results for row in result.rows)
    return 0 if passes and not unequal else 1


if __name__ == "__main__":
    run_program(main)
