"""Exchanges without a model: steps in which the ranks send each other words that all of them know,
by the words' own way from kernel to kernel.
"""

from collections.abc import Callable, Sequence

import torch

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange.decode import next_step
from dsv4.ops.exchange.known_words import check_known, push_known
from dsv4.parallel.rank_state import connect
from dsv4.peers import SLOTS, InboxLayout, Peers, naming_missing_words

# Of a step: 43 layers have 86.
EXCHANGES = 128


class KnownExchanges:
    """A step of ``exchanges`` sums of ``[tokens, width]`` over a rank on each of ``devices``, of
    which several may be one. Each rank counts for itself the sums that are wrong.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        width: int,
        tokens: int = 1,
        exchanges: int = EXCHANGES,
        view: Callable[[Peers], Peers] = lambda peers: peers,
    ) -> None:
        """``tokens`` up to 8, an even ``width``. ``exchanges``: a multiple of the two slots, up to
        254, so that one step may follow another. ``view``: as which the ranks are recorded. Raises
        ``UserError`` without peer access.
        """
        if exchanges % SLOTS:
            raise ValueError(f"exchanges: found {exchanges}, expected a multiple of {SLOTS}")
        layout = InboxLayout(len(devices), width, len(devices))
        self.devices = tuple(devices)
        self.exchanges = exchanges
        self.peers = [view(peers) for peers in connect(layout, devices, tokens)]
        self._wrong = [torch.zeros(1, dtype=torch.int32, device=device) for device in devices]
        self._programs: list[Program] = []
        for peers, wrong_1 in zip(self.peers, self._wrong, strict=True):
            recording = Recording(Target.of(wrong_1.device), tokens, None, peers)
            next_step(recording)
            for _ in range(exchanges):
                check_known(recording, push_known(recording, tokens, width), wrong_1)
            self._programs.append(Program(recording))

    def run(self) -> None:
        """Queues a step of all ranks on the current streams: whatever waits behind all that it
        waits for.
        """
        for index in range(len(self._programs[0].recording.items)):
            for rank in range(len(self.devices)):
                self.run_rank(rank, index, index + 1)

    def run_rank(self, rank: int, start: int = 0, stop: int | None = None) -> None:
        """Queues the items ``start`` to ``stop`` of one rank, which waits for the others."""
        program = self._programs[rank]
        with torch.cuda.device(program.device):
            program.run(program.recording.tokens, start, stop)

    def wrong(self) -> list[int]:
        """Waits: how many sums each rank has found wrong. Raises ``RuntimeError`` where one has
        waited for another in vain.
        """
        with naming_missing_words(self.peers[0].fault_4):
            return [int(wrong_1) for wrong_1 in self._wrong]
