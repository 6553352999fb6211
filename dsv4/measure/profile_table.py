"""The table that ``--profile`` prints, for ops and for kernels alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# In place of a layer's kind: the parts of a step that belong to no layer.
HEAD = "head"
# The part that drafts, by the name that steps give it.
DRAFT = "draft"
COLUMNS = ("SWA", "CSA", "HCA", HEAD, DRAFT)


@dataclass(frozen=True)
class Row:
    """``us`` in all ``count`` calls; ``by_kind``: of it, µs per layer of a kind, or per step at its
    head, or per part that drafts.

    ``gap_us``: how long the device had nothing to do before these calls, where that is known.
    """

    name: str
    count: int
    us: float
    by_kind: Mapping[str, float] = field(default_factory=dict)
    gap_us: float | None = None


def format_table(title: str, rows: Sequence[Row], total_us: float) -> str:
    """The slowest row first, with its share of ``total_us``; a column for every kind that has a
    value.
    """
    kinds = [kind for kind in COLUMNS if any(kind in row.by_kind for row in rows)]
    gaps = any(row.gap_us is not None for row in rows)
    heading = "".join(f"{kind:>11}" for kind in kinds)
    gap_heading = f" {'gap before':>11}" if gaps else ""
    lines = [
        f"{title:<26} {'count':>7} {'ms':>10} {'%':>6}{gap_heading}"
        + (f"   µs each:{heading}" if kinds else "")
    ]
    for row in sorted(rows, key=lambda row: -row.us):
        share = 100 * row.us / total_us if total_us > 0 else 0.0
        means = "".join(
            f"{row.by_kind[kind]:>11.2f}" if kind in row.by_kind else 11 * " " for kind in kinds
        )
        gap = "" if not gaps else 12 * " " if row.gap_us is None else f" {row.gap_us / 1000:>11.3f}"
        line = f"  {row.name:<24} {row.count:>7} {row.us / 1000:>10.3f} {share:>6.1f}{gap}"
        lines.append(f"{line}{11 * ' '}{means}".rstrip())
    return "\n".join(lines)
