"""What drafts were worth: counted as they are verified, and the number of drafts that pays most."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from dsv4.errors import UserError
from dsv4.run_stats import DraftStats

# Steps whose times have to be seen of a number of drafts before they say something, how often the
# number is chosen anew, and after how many steps everything is measured again.
TRIAL_STEPS = 8
CHOICE_STEPS = 32
MEASURED_STEPS = 512
# A module whose first draft is kept less often does not fit its model: said of so many and more.
USELESS_ACCEPTANCE = 0.2
JUDGED_DRAFTS = 32

_LOG = logging.getLogger("dsv4")


class Tally:
    """The counts of a run."""

    def __init__(self, most: int) -> None:
        """``most``: drafts of a step."""
        self._steps = 0
        self._tokens = 0
        self._drafted = [0] * most
        self._accepted = [0] * most
        self._draft_seconds = 0.0
        self._verify_seconds = 0.0

    def add(self, drafted: int, accepted: int, tokens: int, seconds: tuple[float, float]) -> None:
        """A step that gave ``tokens``; ``seconds``: of drafting and of verifying."""
        self._steps += 1
        self._tokens += tokens
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        self._draft_seconds += seconds[0]
        self._verify_seconds += seconds[1]

    def stats(self) -> DraftStats:
        """So far."""
        used = sum(made > 0 for made in self._drafted)
        return DraftStats(
            self._steps,
            self._tokens,
            tuple(self._drafted[:used]),
            tuple(self._accepted[:used]),
            self._draft_seconds,
            self._verify_seconds,
        )


class Usefulness:
    """Says once when hardly any first draft is kept."""

    def __init__(self) -> None:
        self._warned = False

    def judge(self, stats: DraftStats) -> None:
        """Of a run."""
        if self._warned or not stats.drafted or stats.drafted[0] < JUDGED_DRAFTS:
            return
        if stats.acceptance[0] < USELESS_ACCEPTANCE:
            self._warned = True
            _LOG.warning(
                "drafts: %d of %d first drafts were accepted, expected %.0f %% or more: "
                "wrong draft weights for this model?",
                stats.accepted[0],
                stats.drafted[0],
                100 * USELESS_ACCEPTANCE,
            )


class DraftCount:
    """How many drafts a step makes: a fixed number, or the one that gives most tokens a second by
    what was measured.
    """

    def __init__(self, fixed: int | None, most: int) -> None:
        """``fixed`` None: measured, from ``most`` down to none."""
        self._fixed = fixed
        self._most = most
        self._seconds: defaultdict[int, list[float]] = defaultdict(list)
        self._drafted = [0] * most
        self._accepted = [0] * most
        self._steps = 0
        self._chosen = most if fixed is None else fixed

    @classmethod
    def asked(
        cls, drafts: int | Literal["auto"] | None, most: int, trained_block: int
    ) -> "DraftCount":
        """Of ``EngineConfig.draft_tokens``, for a module that can make ``most``. Raises
        ``UserError`` for more.
        """
        if isinstance(drafts, int) and drafts > most:
            raise UserError(
                f"EngineConfig.draft_tokens: found {drafts}, expected 1 to {most} "
                f"(the module was trained to make {trained_block})"
            )
        fixed = trained_block if drafts is None else drafts
        return cls(None if fixed == "auto" else min(fixed, most), most)

    @property
    def possible(self) -> tuple[int, ...]:
        """The numbers of drafts that steps may have but for none."""
        return tuple(range(1, self._most + 1)) if self._fixed is None else (self._fixed,)

    @property
    def now(self) -> int:
        """For the next step."""
        return self._chosen

    def add(self, drafted: int, accepted: int, seconds: float) -> None:
        """A step with all of its time."""
        if self._fixed is not None:
            return
        self._seconds[drafted].append(seconds)
        for position in range(min(drafted, accepted + 1)):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        self._steps += 1
        if self._steps % MEASURED_STEPS == 0:
            self._seconds.clear()
        untried = [count for count in self._trials() if len(self._seconds[count]) < TRIAL_STEPS]
        if untried:
            self._chosen = untried[0]
        elif self._steps % CHOICE_STEPS == 0:
            self._chosen = max(range(self._most + 1), key=self._tokens_per_second)
            # Shares change with the text: old ones count half.
            for position in range(self._most):
                self._drafted[position] = (self._drafted[position] + 1) // 2
                self._accepted[position] //= 2

    def _trials(self) -> Sequence[int]:
        """The numbers whose times are measured; those between are taken to lie on a line."""
        return sorted({self._most, 1, 0}, reverse=True)

    def _tokens_per_second(self, count: int) -> float:
        tokens = 1.0
        kept = 1.0
        for position in range(count):
            kept *= self._accepted[position] / max(1, self._drafted[position])
            tokens += kept
        return tokens / self._expected_seconds(count)

    def _expected_seconds(self, count: int) -> float:
        known = sorted(number for number, times in self._seconds.items() if times)
        below = max(number for number in known if number <= count)
        above = min(number for number in known if number >= count)
        low, high = (_median(self._seconds[number]) for number in (below, above))
        share = 0.0 if above == below else (count - below) / (above - below)
        return low + share * (high - low)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
