"""What drafts were worth: counted as they are verified, and the number of drafts that pays most."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.run_stats import DraftStats

# Steps whose times have to be seen of a number of drafts before they say something, how often the
# number is chosen anew, and after how many steps everything is measured again: sooner where drafts
# have not paid, and then less and less often.
TRIAL_STEPS = 4
CHOICE_STEPS = 32
MEASURED_STEPS = 512
TRIED_AGAIN = (128, 2048)
# A module whose first draft is kept less often does not fit its model: said of so many and more.
USELESS_ACCEPTANCE = 0.2
JUDGED_DRAFTS = 32

# Drafts of a step, as asked for: a number; None, as many as the module was trained to make;
# "if_faster", these or none; "auto", any number.
AskedDrafts = int | Literal["if_faster", "auto"] | None

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
        self._drafted = 0
        self._accepted = 0

    def judge(self, stats: DraftStats) -> None:
        """Of a run, and of those before it."""
        if self._warned or not stats.drafted:
            return
        self._drafted += stats.drafted[0]
        self._accepted += stats.accepted[0]
        if self._drafted < JUDGED_DRAFTS:
            return
        if self._accepted < USELESS_ACCEPTANCE * self._drafted:
            self._warned = True
            _LOG.warning(
                "drafts: %d of %d first drafts were accepted, expected %.0f %% or more: "
                "wrong draft weights for this model?",
                self._accepted,
                self._drafted,
                100 * USELESS_ACCEPTANCE,
            )


def drafts_of_a_step(engine: EngineConfig) -> AskedDrafts:
    """``EngineConfig.draft_tokens``; where "auto" chose the module, drafts have to be faster."""
    if engine.draft == "auto" and engine.draft_tokens is None:
        return "if_faster"
    return engine.draft_tokens


class DraftCount:
    """How many drafts a step makes: of several numbers the one that gives most tokens a second by
    what was measured.
    """

    def __init__(self, choices: Sequence[int], by_times: bool = True) -> None:
        """``choices``: numbers of drafts, ascending; with several none is among them. ``by_times``
        False: steps take ``_nominal_seconds``, whatever was measured.
        """
        self._choices = choices
        self._by_times = by_times
        most = choices[-1]
        self._seconds: defaultdict[int, list[float]] = defaultdict(list)
        self._drafted = [0] * most
        self._accepted = [0] * most
        self._steps = 0
        self._tried_again = MEASURED_STEPS
        self._pause = TRIED_AGAIN[0]
        self._is_tried = False
        self._pays = True
        self._chosen = most

    @classmethod
    def asked(cls, drafts: AskedDrafts, most: int, trained_block: int) -> "DraftCount":
        """For a module that can make ``most``. Raises ``UserError`` for more."""
        if isinstance(drafts, int) and drafts > most:
            raise UserError(
                f"EngineConfig.draft_tokens: found {drafts}, expected 1 to {most} "
                f"(the module was trained to make {trained_block})"
            )
        if isinstance(drafts, int):
            return cls((drafts,))
        if drafts == "auto":
            return cls(range(most + 1))
        block = min(trained_block, most)
        return cls((block,) if drafts is None else (0, block))

    def for_run(self, is_greedy: bool) -> "DraftCount":
        """What a run goes by: this one, or, where a seed has to repeat its text, one that knows
        neither times nor earlier runs.
        """
        if is_greedy or not self.may_rest:
            return self
        return DraftCount(self._choices, by_times=False)

    @property
    def possible(self) -> tuple[int, ...]:
        """The numbers of drafts that steps may have but for none."""
        return tuple(count for count in self._choices if count)

    @property
    def may_rest(self) -> bool:
        """Whether there may be none for a while."""
        return len(self._choices) > 1

    @property
    def now(self) -> int:
        """For the next step."""
        return self._chosen

    def add(self, drafted: int, accepted: int, seconds: float) -> None:
        """A step with all of its time."""
        if not self.may_rest:
            return
        self._seconds[drafted].append(seconds)
        for position in range(min(drafted, accepted + 1)):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        self._steps += 1
        if self._steps == self._tried_again:
            self._seconds.clear()
            self._is_tried = False
        untried = [count for count in self._trials() if len(self._seconds[count]) < TRIAL_STEPS]
        if untried:
            self._chosen = untried[0]
        elif not self._is_tried:
            self._is_tried = True
            self._choose()
            self._set_next_trial()
        elif self._steps % CHOICE_STEPS == 0:
            self._choose()

    def rest(self, window: int) -> int:
        """How many steps may be without drafts, and be skipped, up to ``window`` steps before
        drafts are tried again.
        """
        rests = self._is_tried and self._chosen == 0
        return max(0, self._tried_again - window - self._steps) if rests else 0

    def skip(self) -> None:
        """A step of which nothing is to be learned."""
        self._steps += 1

    def _choose(self) -> None:
        self._chosen = max(self._choices, key=self._tokens_per_second)
        if (self._chosen > 0) != self._pays:
            self._pays = self._chosen > 0
            found = f"{self._accepted[0]} of {self._drafted[0]} first drafts accepted"
            _LOG.info("drafts: %s a step, %s", self._chosen or "none", found)
        # Shares change with the text: old ones count half.
        for position, made in enumerate(self._drafted):
            if made > CHOICE_STEPS:
                self._drafted[position] = made // 2
                self._accepted[position] //= 2

    def _set_next_trial(self) -> None:
        self._tried_again = self._steps + (MEASURED_STEPS if self._pays else self._pause)
        self._pause = TRIED_AGAIN[0] if self._pays else min(2 * self._pause, TRIED_AGAIN[1])

    def _trials(self) -> Sequence[int]:
        """The numbers whose times are measured; those between are taken to lie on a line."""
        return sorted({self._choices[-1], self._choices[1], 0}, reverse=True)

    def _tokens_per_second(self, count: int) -> float:
        tokens = 1.0
        kept = 1.0
        for position in range(count):
            kept *= self._accepted[position] / max(1, self._drafted[position])
            tokens += kept
        return tokens / self._expected_seconds(count)

    def _expected_seconds(self, count: int) -> float:
        if not self._by_times:
            return _nominal_seconds(count)
        known = sorted(self._seconds)
        medians = [_median(self._seconds[number]) for number in known]
        # More drafts never take less: where it was measured so, the host was late for fewer ones.
        seconds = dict(zip(known, accumulate(medians, max), strict=True))
        below = max(number for number in known if number <= count)
        above = min(number for number in known if number >= count)
        share = 0.0 if above == below else (count - below) / (above - below)
        return seconds[below] + share * (seconds[above] - seconds[below])


def _nominal_seconds(count: int) -> float:
    """Of a step with so many drafts, in steps without: V4-Flash with DSpark on two H200."""
    return 1.2 + 0.15 * count if count else 1.0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
