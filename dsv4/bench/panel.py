"""Panels of bars as SVG text: what the plots of the benchmarks are made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEIGHT = 356
MARGIN = 20
_TOP = 64
_BOTTOM = 60
_LEGEND = 333
_AXIS = 50
_MOST_STEPS = 6
_COLORS = {
    "eager": "#bbb",
    "split": "#7ab",
    "full": "#06c",
    "prefill": "#06c",
    "computed": "#06c",
    "drawn caches": "#7ab",
    "caches": "#06c",
    "steps": "#7ab",
}


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
        return HEIGHT - _BOTTOM - value / self.top * (HEIGHT - _TOP - _BOTTOM)

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
                f'<text x="{middle:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
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
                f'<text x="{start}" y="{HEIGHT - 7}" fill="#c00">floor: reading the weights that '
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


def title_of(record: Any) -> str:
    """What ran where, of a record with a geometry."""
    result = record["result"]
    placement = result["placement"]
    devices = placement.get("layers", placement.get("ranks"))
    gpus = record["machine"]["gpus"][: len(devices)]
    parallel = placement["parallel"] if len(gpus) > 1 else "one device"
    model = f"{result['geometry']}, {result['layers']} layers, {result['layout']}"
    return f"{model}, {len(gpus)} × {gpus[0]}, {parallel}"


def svg(title: str, width: int, parts: Sequence[str]) -> str:
    """A picture of ``width`` with ``parts``."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{MARGIN}" y="22" font-size="14">{title}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def ticks(top: float) -> list[float]:
    """Round values from 0 to ``top`` in a few equal steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(top / _MOST_STEPS))
    step = next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= _MOST_STEPS)
    return [round(index * step, 10) for index in range(int(top / step) + 1)]


def legend(series: Sequence[str], left: float = MARGIN, width: int = 60) -> list[str]:
    """The colours of ``series`` under the panel that begins at ``left``."""
    x = left + _AXIS
    return [
        f'<rect x="{x + width * index}" y="{_LEGEND - 9}" width="10" height="10" '
        f'fill="{_COLORS[one]}"/>'
        f'<text x="{x + width * index + 14}" y="{_LEGEND}">{one}</text>'
        for index, one in enumerate(series)
    ]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
