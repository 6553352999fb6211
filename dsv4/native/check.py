"""A check of a native kernel, what came of it, and the verdict on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Outcome = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Check:
    """A comparison of ``kernel`` with what it stands in for.

    ``run(device)`` launches both and returns what is wrong in one line, None if nothing is. It
    raises ``RuntimeError`` for an error of the device.
    """

    name: str
    kernel: str
    run: Callable[[torch.device], str | None]


@dataclass(frozen=True)
class Result:
    """What came of a check. ``reason``: why it did not pass, in one line."""

    check: str
    kernel: str
    outcome: Outcome
    reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The results of all checks, in their order."""

    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether there are results and every check passed."""
        return bool(self.results) and self.complaint is None

    @property
    def conclusive(self) -> bool:
        """Whether another run would say the same: everything passed, or something is wrong. Checks
        that found no memory say nothing.
        """
        return self.passed or any(result.outcome == "failed" for result in self.results)

    @property
    def complaint(self) -> str | None:
        """The first failure, or else the first check that did not run: kernel, check, reason."""
        if not self.results:
            return "there are no checks"
        for outcome in ("failed", "not run"):
            for result in self.results:
                if result.outcome == outcome:
                    return f"{result.kernel} ({result.check}): {result.reason or outcome}"
        return None
