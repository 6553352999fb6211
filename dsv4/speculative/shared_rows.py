"""The streams that a chunk of a prompt leaves for a draft module, whole on every rank: behind the
first seam a rank has those of its own tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.exchange.token_share import TokenShare


@dataclass(frozen=True)
class SharedRows:
    """Of the rank that ``share`` is for: ``of_ranks`` has memory of every rank, the last tokens'
    streams ``[R, M, E]`` of every tap.
    """

    share: TokenShare
    of_ranks: tuple[tuple[Tensor, ...], ...]

    def record(self, recording: Recording, taps: Sequence[Tensor]) -> None:
        """Sends the rank's own rows of ``taps`` ``[T, M, E]``; behind it all ranks have all rows,
        those of the T-th last token or the R-th last one first.
        """
        recording.call(self._send, *taps)
        recording.meet()

    def _send(self, tokens: int, *taps: Tensor) -> None:
        first = max(0, tokens - self.of_ranks[0][0].shape[0])
        for start, stop in self.share.spans(first, tokens):
            for memory in self.of_ranks:
                for rows, tap in zip(memory, taps, strict=True):
                    rows[start - first : stop - first].copy_(tap[start:stop], non_blocking=True)
