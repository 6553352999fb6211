"""Ranks that compute when they are called: one thread each, which meet where results are added."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsv4.on_failure import OnFailure
from dsv4.ops import Ops
from dsv4.ops.exchange import sum_ranks
from dsv4.ops.moe import Mixture
from dsv4.weights.quant import Weight

Result = TypeVar("Result")

_SIGNAL_SECONDS = 1.0


class Meeting:
    """Where ``ranks`` threads give their results and get those of all, in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self._given: list[Any] = [None] * ranks
        self._barrier = Barrier(ranks)

    def meet(self, rank: int, result: Result) -> list[Result]:
        """Waits for all. Raises ``BrokenBarrierError`` once a rank has failed."""
        self._given[rank] = result
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def run(self, ranks: Sequence[Callable[[], Result]]) -> list[Result]:
        """Runs a function for every rank, side by side, and returns their results.

        Raises what the first rank that failed has raised. An interruption of the caller leaves no
        rank running.
        """
        begin = Barrier(len(ranks) + 1)
        # Ranks that go on would write into a state that is taken back meanwhile.
        with (
            ThreadPoolExecutor(len(ranks)) as threads,
            OnFailure(self._barrier.abort),
            OnFailure(begin.abort),
        ):
            futures = [threads.submit(self._attend, begin, rank) for rank in ranks]
            # Nobody waits for a thread whose start was interrupted: it has to be one without work.
            begin.wait()
            # A signal that comes right in front of a wait is seen behind it.
            while wait(futures, _SIGNAL_SECONDS).not_done:
                pass
        failures = [future.exception() for future in futures]
        for failure in failures:
            if failure is not None and not isinstance(failure, BrokenBarrierError):
                raise failure
        return [future.result() for future in futures]

    def _attend(self, begin: Barrier, rank: Callable[[], Result]) -> Result:
        """A rank that fails leaves nobody waiting."""
        with OnFailure(self._barrier.abort), torch.inference_mode():
            begin.wait()
            return rank()


@dataclass(frozen=True)
class RankOps:
    """The torch ops of one rank: those that end in a sum over the ranks, or in their rows."""

    ops: Ops
    meeting: Meeting
    rank: int

    def table(self) -> Ops:
        """The ops with these in their places."""
        return replace(
            self.ops,
            row_parallel_linear=self.row_parallel_linear,
            gather_logits=self.gather_logits,
            moe=self.moe,
        )

    def row_parallel_linear(self, x_TK: Tensor, weight: Weight) -> Tensor:
        """``dsv4.ops.exchange.row_parallel_linear``."""
        partial_TN = self.ops.linear(x_TK, weight, torch.float32)
        return sum_ranks(self.meeting.meet(self.rank, partial_TN), x_TK.dtype)

    def gather_logits(self, logits_TV: Tensor) -> Tensor:
        """``dsv4.ops.exchange.gather_logits``."""
        return torch.cat(self.meeting.meet(self.rank, logits_TV), -1)

    def moe(self, x_TE: Tensor, *arguments: Any) -> Mixture:
        """``dsv4.ops.moe.moe``."""
        whole: Callable[..., Mixture] = self.ops.moe
        mixture = whole(x_TE, *arguments, out_dtype=torch.float32)
        partials = self.meeting.meet(self.rank, mixture.y_TE)
        return mixture._replace(y_TE=sum_ranks(partials, x_TE.dtype))
