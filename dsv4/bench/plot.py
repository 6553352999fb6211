"""``python -m dsv4.bench.plot FILE...``: an SVG beside every JSON file of ``bench engine
--geometry``.

Decode in ms per token, by position and mode, against the floor; prefill in tokens per second, by
prompt length.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.bench.decode_modes import DECODE_MODES
from dsv4.command.flags import OneLineParser
from dsv4.command.output_file import write_output
from dsv4.command.program import command, run_program
from dsv4.errors import UserError

_WIDTH = 900
_HEIGHT = 356
_TOP = 64
_BOTTOM = 60
_LEGEND = 333
_MARGIN = 20
_AXIS = 50
_COLORS = {"eager": "#bbb", "split": "#7ab", "full": "#06c", "prefill": "#06c"}


@dataclass(frozen=True)
class Panel:
    """Groups of bars, ``{group: {series: value}}``, in ``width`` pixels from ``left``; ``floor`` is
    a dashed line.
    """

    title: str
    groups: Mapping[str, Mapping[str, float]]
    left: float
    width: float
    floor: float | None = None

    @property
    def top(self) -> float:
        """The value at the upper edge."""
        return max(value for group in self.groups.values() for value in group.values()) * 1.1

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)

    def parts(self) -> list[str]:
        """Grid, bars with their values, the floor, the title."""
        right = self.left + self.width
        start = self.left + _AXIS
        parts = [f'<text x="{self.left}" y="44" font-size="12">{self.title}</text>']
        for value in ticks(self.top):
            y = self.y(value)
            parts.append(
                f'<line x1="{start}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            )
            parts.append(
                f'<text x="{start - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>'
            )
        step = (right - start) / len(self.groups)
        for index, (name, bars) in enumerate(self.groups.items()):
            middle = start + (index + 0.5) * step
            parts.append(
                f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
                f"{name}</text>"
            )
            parts += self._bars(bars, middle, min(0.8 * step / len(bars), 54))
        if self.floor is not None:
            y = self.y(self.floor)
            parts.append(
                f'<line x1="{start}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c00" '
                f'stroke-dasharray="6 4"/>'
                f'<text x="{right}" y="{_LEGEND}" text-anchor="end" fill="#c00">'
                f"floor {self.floor:.2f} ms</text>"
                f'<text x="{start}" y="{_HEIGHT - 7}" fill="#c00">floor: reading the weights that '
                "one token needs, once, device after device, at the measured copy rate</text>"
            )
        return parts

    def _bars(self, bars: Mapping[str, float], middle: float, width: float) -> list[str]:
        parts = []
        for index, (series, value) in enumerate(bars.items()):
            x = middle + (index - len(bars) / 2) * width
            y = self.y(value)
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" '
                f'height="{self.y(0) - y:.1f}" fill="{_COLORS[series]}">'
                f"<title>{series}: {value:,g}</title></rect>"
                f'<text x="{x + width / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">'
                f"{_short(value)}</text>"
            )
        return parts


def engine_svg(record: Any) -> str:
    """The plot of a file of ``bench engine --geometry`` as SVG text. Raises ``UserError`` for
    another record.
    """
    result = record.get("result") if isinstance(record, Mapping) else None
    if not isinstance(result, Mapping) or not {"geometry", "decode", "floor_ms"} <= set(result):
        raise UserError("found another kind of record, expected one of 'bench engine --geometry'")
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
    half = (_WIDTH - 3 * _MARGIN) / 2
    panels = [
        Panel("decode, ms per token, by position", decode, _MARGIN, half, result["floor_ms"]),
        Panel("prefill, tokens per second, by prompt length", prefill, 2 * _MARGIN + half, half),
    ]
    gpus = record["machine"]["gpus"][: len(result["placement"]["layers"])]
    layout = result["layout"]
    parallel = result["placement"]["parallel"] if len(gpus) > 1 else "one device"
    model = f"{result['geometry']}, {result['layers']} layers, {layout}"
    title = f"{model}, {len(gpus)} × {gpus[0]}, {parallel}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_MARGIN}" y="22" font-size="14">{title}</text>',
            *_legend(
                [mode for mode in DECODE_MODES if any(mode in bars for bars in decode.values())]
            ),
            *(part for panel in panels for part in panel.parts()),
            "</svg>\n",
        ]
    )


def ticks(top: float, most: int = 6) -> list[float]:
    """Round values from 0 to ``top`` in equal steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= most)
    return [round(index * step, 10) for index in range(int(top / step) + 1)]


def _legend(modes: Sequence[str]) -> list[str]:
    x = _MARGIN + _AXIS
    return [
        f'<rect x="{x + 60 * index}" y="{_LEGEND - 9}" width="10" height="10" '
        f'fill="{_COLORS[mode]}"/>'
        f'<text x="{x + 60 * index + 14}" y="{_LEGEND}">{mode}</text>'
        for index, mode in enumerate(modes)
    ]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


@command
def main(argv: list[str] | None = None) -> int:
    """The command; a file that is not such a record is a user error."""
    parser = OneLineParser(prog="python -m dsv4.bench.plot", description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="JSON files, each plotted beside itself as .svg"
    )
    for path in parser.parse_args(argv).files:
        text = path.read_bytes()
        try:
            plot = engine_svg(json.loads(text))
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
        write_output("FILE", path.with_suffix(".svg"), plot)
    return 0


if __name__ == "__main__":
    run_program(main)
