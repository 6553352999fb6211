"""An SVG plot of 1 − cosine by layer on a logarithmic axis, written by hand: no plotting library is
needed for it.
"""

import math

_WIDTH = 900
_HEIGHT = 360
_LEFT = 70
_TOP = 40
_BOTTOM = 60
_DECADES = (-12, 0)


def cosine_svg(points: list[tuple[str, float]], threshold: float) -> str:
    """The plot as SVG text: one dot per (name, cosine), a dashed line at the threshold, NaN at the
    top edge.
    """
    step = (_WIDTH - _LEFT - 20) / max(1, len(points))
    grid = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{_y(exponent):.1f}" y2="{_y(exponent):.1f}" '
        f'stroke="#ddd"/>'
        f'<text x="{_LEFT - 8}" y="{_y(exponent) + 4:.1f}" text-anchor="end">1e{exponent}</text>'
        for exponent in range(_DECADES[0], _DECADES[1] + 1, 2)
    ]
    dots = [
        _dot(_LEFT + (index + 0.5) * step, name, cosine)
        for index, (name, cosine) in enumerate(points)
    ]
    limit = _y(_log_distance(threshold))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="14">1 − cosine, by layer</text>',
            *grid,
            f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{limit:.1f}" y2="{limit:.1f}" '
            'stroke="#c00" stroke-dasharray="6 4"/>',
            *dots,
            "</svg>\n",
        ]
    )


def _dot(x: float, name: str, cosine: float) -> str:
    y = _y(_log_distance(cosine))
    below = _HEIGHT - _BOTTOM + 14
    label = f'<text x="{x:.1f}" y="{below}" transform="rotate(60 {x:.1f} {below})">'
    title = f"<title>{name}: {cosine:.8f}</title>"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#06c">{title}</circle>{label}{name}</text>'
    )


def _log_distance(cosine: float) -> float:
    if math.isnan(cosine):
        return _DECADES[1]
    return min(max(math.log10(max(1 - cosine, 10.0 ** _DECADES[0])), _DECADES[0]), _DECADES[1])


def _y(exponent: float) -> float:
    low, high = _DECADES
    return _HEIGHT - _BOTTOM - (exponent - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
