"""``python -m dsv4.bench.plot FILE...``: an SVG beside every JSON file of ``bench engine
--geometry`` or ``bench context``.

Of the engine: decode in ms per token, by position and mode, against the floor; prefill in tokens
per second, by prompt length.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4.bench.context_plot import context_svg
from dsv4.bench.decode_modes import DECODE_MODES
from dsv4.bench.panel import MARGIN, Panel, legend, svg, title_of
from dsv4.command.flags import OneLineParser
from dsv4.command.output_file import refuse_shared_files, write_output
from dsv4.command.program import command, run_program
from dsv4.errors import UserError

_WIDTH = 900
# What missing keys, other types and numbers that cannot be drawn raise.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)


def engine_svg(record: Any) -> str:
    """The plot of a file of ``bench engine --geometry`` as SVG text. Raises ``UserError`` for
    another record.
    """
    result = record.get("result") if isinstance(record, Mapping) else None
    if not isinstance(result, Mapping) or not {"geometry", "decode", "floor_ms"} <= set(result):
        expected = "one of 'bench engine --geometry', or of 'bench context' without --plan-only"
        raise UserError(f"found another kind of record, expected {expected}")
    decode = {
        f"at {int(position):,}": {
            mode: at[mode]["ms_per_token"] for mode in DECODE_MODES if mode in at
        }
        for position, at in result["decode"].items()
    }
    prefill = {
        f"{int(length):,}": {"prefill": rate}
        for length, rate in result["prefill_tokens_per_second"].items()
    }
    half = (_WIDTH - 3 * MARGIN) / 2
    panels = [
        Panel("decode, ms per token, by position", decode, MARGIN, half, result["floor_ms"]),
        Panel("prefill, tokens per second, by prompt length", prefill, 2 * MARGIN + half, half),
    ]
    shown = [mode for mode in DECODE_MODES if any(mode in bars for bars in decode.values())]
    parts = [*legend(shown), *(part for panel in panels for part in panel.parts())]
    return svg(title_of(record), _WIDTH, parts)


def record_svg(record: Any) -> str:
    """The plot of a record of either kind. Raises ``UserError`` for another one."""
    result = record.get("result") if isinstance(record, Mapping) else None
    if isinstance(result, Mapping) and "prefill_computed" in result:
        return context_svg(record)
    return engine_svg(record)


def file_svg(path: Path) -> str:
    """The plot of a file. Raises ``UserError`` for one that is no record, or a damaged one."""
    try:
        record = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    try:
        return record_svg(record)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except _DAMAGE as error:
        raise UserError(f"{path}: damaged record ({type(error).__name__}: {error})") from None


@command
def main(argv: list[str] | None = None) -> int:
    """The command; a file that is not such a record is a user error."""
    parser = OneLineParser(prog="python -m dsv4.bench.plot", description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="JSON files, each plotted beside itself as .svg"
    )
    plots = {path: file_svg(path) for path in parser.parse_args(argv).files}
    written = [(f"plot of {path}", path.with_suffix(".svg")) for path in plots]
    refuse_shared_files([("FILE", path) for path in plots], written)
    for (name, path), text in zip(written, plots.values(), strict=True):
        write_output(name, path, text)
    return 0


if __name__ == "__main__":
    run_program(main)
