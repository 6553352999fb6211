"""The table that ``--profile`` prints, for ops and for kernels alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Layer kinds, and the parts of a step that belong to no layer.
PARTS = ("start", "SWA", "CSA", "HCA", "head")


@dataclass(frozen=True)
class Row:
    """``us`` in all ``count`` calls; ``by_part``: of it, µs per layer of a kind, or per step at its start and head.

    ``gap_us``: how long the device had nothing to do before these calls, where that is known.
    """

    name: str
    count: int
    us: float
    by_part: Mapping[str, float] = field(default_factory=dict)
    gap_us: float | None = None


def format_table(title: str, rows: Sequence[Row], total_us: float) -> str:
    """The slowest row first, with its share of ``total_us``; a column for every part that has a value."""
    parts = [part for part in PARTS if any(part in row.by_part for row in rows)]
    gaps = any(row.gap_us is not None for row in rows)
    heading = "".join(f"{part:>11}" for part in parts)
    gap_heading = f" {'gap before':>11}" if gaps else ""
    lines = [f"{title:<26} {'count':>7} {'ms':>10} {'%':>6}{gap_heading}" + (f"   µs each:{heading}" if parts else "")]
    for row in sorted(rows, key=lambda row: -row.us):
        share = 100 * row.us / total_us if total_us > 0 else 0.0
        means = "".join(f"{row.by_part[part]:>11.2f}" if part in row.by_part else 11 * " " for part in parts)
        gap = "" if not gaps else 12 * " " if row.gap_us is None else f" {row.gap_us / 1000:>11.3f}"
        line = f"  {row.name:<24} {row.count:>7} {row.us / 1000:>10.3f} {share:>6.1f}{gap}"
        lines.append(f"{line}{11 * ' '}{means}".rstrip())
    return "\n".join(lines)
