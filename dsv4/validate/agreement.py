"""How far two values agree, token by token: gathered from slices, so that a long value is never
held as a whole.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Of the worst token. Rounding to bfloat16 alone moves logits of the demo by 1.6e-4
# (docs/validation.md); values in float32 stay above 1 − 1e-6.
DEFAULT_THRESHOLD = 0.999


@dataclass(frozen=True)
class Agreement:
    """How far two values ``[T, ...]`` agree.

    ``cosine`` is over all tokens. ``worst_token`` is the least 2a·b / (|a|² + |b|²) of a token,
    ``worst_at``: its cosine, less where the lengths differ, 1 − |a − b|² / (|a|² + |b|²).
    ``relative_error`` is max |a − b| / max |b|. Of chosen experts or entries both numbers are the
    share that is on both sides, and there is no error. ``first_under`` is the first token whose
    number is under the threshold, ``under`` how many are of those ``compared``. NaN is under every
    threshold. Where ``worst_at`` is None nothing was compared, and the numbers mean nothing.
    ``factor``: b times it is a but for less than a tenth of what is under the threshold.
    """

    name: str
    kind: str
    cosine: float
    worst_token: float
    worst_at: int | None
    relative_error: float | None
    first_under: int | None
    under: int
    compared: int
    factor: float | None

    @property
    def passes(self) -> bool:
        return self.first_under is None

    @property
    def fails_in_most(self) -> bool:
        """Whether more than half of the tokens are under the threshold: rounding decides near ties
        in fewer.
        """
        return 2 * self.under > self.compared


class RowComparison:
    """Compares two values slice by slice, in float64, for an ``Agreement``."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rows = 0
        # a·b, |a|² and |b|² over all rows, of values divided by the scale: squares of small ones
        # would be 0.
        self._products = [0.0, 0.0, 0.0]
        self._scale = 0.0
        self._error = 0.0
        self._largest = 0.0
        self._worst = math.inf
        self._worst_at: int | None = None
        self._first_under: int | None = None
        self._under = 0
        self._compared = 0

    def add(self, found: Tensor, reference: Tensor, compared_R: Tensor | None = None) -> None:
        """The next rows of both values ``[rows, ...]``; ``compared_R``: bool ``[rows]``, without
        which rows have no number.
        """
        a = found.double().unsqueeze(-1).flatten(1)
        b = reference.double().unsqueeze(-1).flatten(1)
        if a.numel():
            self._error = _larger(self._error, float((a - b).abs().max()))
            self._largest = _larger(self._largest, float(b.abs().max()))
        scales_R = a.abs().sum(1) + b.abs().sum(1)
        divisors_R1 = scales_R.where(scales_R != 0, 1.0).unsqueeze(1)
        a = a / divisors_R1
        b = b / divisors_R1
        products_3R = torch.stack(((a * b).sum(1), a.square().sum(1), b.square().sum(1)))
        both_R = products_3R[1] + products_3R[2]
        agreements_R = torch.where(both_R == 0, 1.0, 2 * products_3R[0] / both_R)
        self._note(agreements_R if compared_R is None else agreements_R.where(compared_R, math.inf))
        scale = self._scale + float(scales_R.sum())
        if scale != 0:
            sums_3 = products_3R @ (scales_R / scale).square()
            self._add_products(sums_3, (self._scale / scale) ** 2)
            self._scale = scale

    def add_chosen(self, found: Tensor, reference: Tensor) -> None:
        """The next rows of ids ``[rows, K]``, whose order and number may differ; negative: none."""
        match = match_ids(found, reference)
        most = torch.maximum(match.found_count, match.reference_count)
        shared = match.both.sum(1)
        self._note(torch.where(most == 0, 1.0, shared.double() / most))
        self._add_products(torch.stack((shared.sum(), most.sum(), most.sum())))

    def result(self, name: str, kind: str, chosen: bool = False) -> Agreement:
        """What the rows so far say; without rows everything agrees."""
        dot, a_square, b_square = self._products
        lengths = math.sqrt(a_square * b_square)
        same = a_square == b_square == 0
        cosine = 1.0 if same else dot / lengths if lengths != 0 else 0.0
        error = self._error / self._largest if self._largest else self._error
        return Agreement(
            name,
            kind,
            cosine,
            1.0 if self._worst_at is None else self._worst,
            self._worst_at,
            None if chosen else error,
            self._first_under,
            self._under,
            self._compared,
            None if chosen else self._factor(cosine),
        )

    def _factor(self, cosine: float) -> float | None:
        dot, _, b_square = self._products
        factor = dot / b_square if b_square else math.nan
        agreement = 2 * factor / (1 + factor * factor)
        explained = 10 * (1 - abs(cosine)) < 1 - agreement
        return factor if agreement < self._threshold and explained else None

    def _add_products(self, more_3: Tensor, factor: float = 1.0) -> None:
        """Adds to a·b, |a|² and |b|² times ``factor``."""
        pairs = zip(self._products, more_3.tolist(), strict=True)
        self._products = [factor * product + more for product, more in pairs]

    def _note(self, agreements_R: Tensor) -> None:
        """The next rows' numbers, float64 ``[rows]``; infinite: none."""
        if agreements_R.numel():
            at = int(agreements_R.nan_to_num(-math.inf).argmin())
            value = float(agreements_R[at])
            if not math.isnan(self._worst) and not value >= self._worst:
                self._worst = value
                self._worst_at = self._rows + at
            under = (~(agreements_R >= self._threshold)).nonzero()
            self._under += len(under)
            self._compared += int((agreements_R != math.inf).sum())
            if self._first_under is None and len(under):
                self._first_under = self._rows + int(under[0])
        self._rows += len(agreements_R)


class Match(NamedTuple):
    """Which ids ``[rows, K]`` of one side the other has, bool, and where, int64 ``[rows, K]``; and
    how many different ones each side has, int64 ``[rows]``.
    """

    both: Tensor
    place: Tensor
    found_count: Tensor
    reference_count: Tensor


def match_ids(found: Tensor, reference: Tensor) -> Match:
    """``found`` int ``[rows, K]`` in ``reference`` int ``[rows, L]``; negative and repeated ids do
    not count.
    """
    a, a_order = found.long().sort(1)
    b, b_order = reference.long().sort(1)
    a_counts = _counts(a)
    b_counts = _counts(b)
    if not b.shape[1]:
        nothing = torch.zeros_like(found, dtype=torch.int64)
        return Match(nothing.bool(), nothing, a_counts.sum(1), b_counts.sum(1))
    place = torch.searchsorted(b, a).clamp(max=b.shape[1] - 1)
    both = a_counts & (b.gather(1, place) == a)
    back = a_order.argsort(1)
    return Match(
        both.gather(1, back),
        b_order.gather(1, place).gather(1, back),
        a_counts.sum(1),
        b_counts.sum(1),
    )


def align(
    values: Tensor, ids: Tensor, other: Tensor, other_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Two float ``[rows, K]``: the values of the ids that both sides chose, in the order of
    ``ids``; 0 elsewhere. And bool ``[rows]``: in which rows there are any.
    """
    match = match_ids(ids, other_ids)
    theirs = other.double().gather(1, match.place) if other.shape[1] else match.place.double()
    ours = values.double().where(match.both, 0.0)
    return ours, theirs.where(match.both, 0.0), match.both.any(1)


def agreement(
    name: str,
    kind: str,
    found: Tensor,
    reference: Tensor,
    threshold: float = DEFAULT_THRESHOLD,
) -> Agreement:
    """Compares two values ``[T, ...]`` at once."""
    comparison = RowComparison(threshold)
    comparison.add(found, reference)
    return comparison.result(name, kind)


def table(rows: list[Agreement]) -> str:
    """The rows as text: those under the threshold are marked with their first token and how many
    there are, and a value of which no row was compared has no numbers.
    """
    width = max([10, *(len(row.name) for row in rows)])
    head = (
        f"{'':<{width}} {'kind':<5} {'cosine':>11} {'worst token':>12} {'at':>7} {'rel. error':>11}"
    )
    return "\n".join([head, *(_line(row, width) for row in rows)])


def _line(row: Agreement, width: int) -> str:
    if row.worst_at is None:
        return f"{row.name:<{width}} {row.kind:<5} {'no rows':>11}"
    error = "" if row.relative_error is None else f"{row.relative_error:.2e}"
    counts = f"{row.under} of {row.compared}"
    mark = "" if row.passes else f"  under the threshold from {row.first_under}: {counts}"
    numbers = f"{row.cosine:>11.8f} {row.worst_token:>12.8f} {row.worst_at:>7} {error:>11}"
    return f"{row.name:<{width}} {row.kind:<5} {numbers}{mark}".rstrip()


def _counts(ids: Tensor) -> Tensor:
    """Which of sorted ids count: not negative, and not the one before."""
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return first & (ids >= 0)


def _larger(a: float, b: float) -> float:
    """The larger one; NaN if either is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
