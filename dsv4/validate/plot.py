"""An SVG plot of 1 − agreement by layer on a logarithmic axis, written by hand: no plotting library
is needed for it.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH = 900
_HEIGHT = 400
_LEFT = 70
_RIGHT = 20
_TOP = 60
_BOTTOM = 90
_DECADES = (-12, 0)
_GOOD = "#06c"
_BAD = "#c00"


class Point(NamedTuple):
    """A value in the plot: the column it stands in (a layer), its name and kind, the agreement of
    its worst token and over all tokens, and whether that is enough.
    """

    column: str
    name: str
    kind: str
    worst_token: float
    cosine: float
    passes: bool


def cosine_svg(points: Sequence[Point], threshold: float) -> str:
    """The plot as SVG text. Per value a dot for 1 − its worst token and a ring for 1 − the cosine
    over all; red where that is not enough. The threshold is a dashed line. NaN is a cross at the
    top edge.
    """
    columns = list(dict.fromkeys((point.column, point.kind) for point in points))
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(columns))
    middles = {column: _LEFT + (index + 0.5) * step for index, column in enumerate(columns)}
    limit = _y(_log_distance(threshold))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="14">1 − agreement, by layer</text>',
            *_legend(),
            *(_grid_line(exponent) for exponent in range(_DECADES[0], _DECADES[1] + 1, 2)),
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}" '
            f'stroke="{_BAD}" stroke-dasharray="6 4"/>',
            f'<text x="{_WIDTH - _RIGHT}" y="{limit - 4:.1f}" text-anchor="end" fill="{_BAD}">'
            f"threshold {threshold:g}</text>",
            *(_label(middles[column], *column) for column in columns),
            *(_mark(middles[point.column, point.kind], point) for point in points),
            "</svg>\n",
        ]
    )


def _legend() -> list[str]:
    """What dots, rings and crosses mean, above the plot."""
    middle = 38
    return [
        f'<circle cx="{_LEFT + 4}" cy="{middle}" r="4" fill="{_GOOD}"/>'
        f'<text x="{_LEFT + 14}" y="{middle + 4}">worst token</text>',
        f'<circle cx="{_LEFT + 104}" cy="{middle}" r="2.5" fill="none" stroke="{_GOOD}"/>'
        f'<text x="{_LEFT + 114}" y="{middle + 4}">over all tokens</text>',
        f'<circle cx="{_LEFT + 224}" cy="{middle}" r="4" fill="{_BAD}"/>'
        f'<text x="{_LEFT + 234}" y="{middle + 4}">under the threshold</text>',
        f'{_cross(_LEFT + 364, middle)}<text x="{_LEFT + 374}" y="{middle + 4}">NaN</text>',
    ]


def _grid_line(exponent: int) -> str:
    y = _y(exponent)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>'
    )


def _label(x: float, name: str, kind: str) -> str:
    y = _HEIGHT - _BOTTOM + 14
    text = escape(f"{name} {kind}".rstrip())
    return f'<text x="{x:.1f}" y="{y}" transform="rotate(60 {x:.1f} {y})">{text}</text>'


def _mark(x: float, point: Point) -> str:
    title = (
        f"<title>{escape(point.name)} {point.kind}: worst token {point.worst_token:.8f}, "
        f"over all {point.cosine:.8f}</title>"
    )
    if math.isnan(point.worst_token):
        return f"<g>{title}{_cross(x, _y(_DECADES[1]))}</g>"
    color = _GOOD if point.passes else _BAD
    ring = (
        ""
        if math.isnan(point.cosine)
        else f'<circle cx="{x:.1f}" cy="{_y(_log_distance(point.cosine)):.1f}" r="2.5" '
        f'fill="none" stroke="{color}"/>'
    )
    dot = f'cx="{x:.1f}" cy="{_y(_log_distance(point.worst_token)):.1f}" r="4" fill="{color}"'
    return f"<g>{title}{ring}<circle {dot}/></g>"


def _cross(x: float, y: float) -> str:
    path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m-8 0l8 -8"
    return f'<path d="{path}" stroke="{_BAD}" stroke-width="2"/>'


def _log_distance(agreement: float) -> float:
    low, high = _DECADES
    return min(max(math.log10(max(1 - agreement, 10.0**low)), low), high)


def _y(exponent: float) -> float:
    low, high = _DECADES
    return _HEIGHT - _BOTTOM - (exponent - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
