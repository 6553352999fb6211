"""When ranks push and find the words of an exchange, by the clocks of their GPUs.

Kernels compiled with ``STAMPS`` (``exchange.cuh``) note the time of the last word that a rank
pushed, and of the last one that it found among those of all ranks. The clocks of two GPUs count
nanoseconds, each from a time of its own: a word that arrives tells the difference, as long as its
way is known to take as long in both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.parallel.known_exchanges import KnownExchanges
from dsv4.peers import MOST_EXCHANGES, Peers

# The last exchanges that there are stamps of, in steps: a run is no longer.
STEPS = 64
PUSHED, FOUND = range(2)
# Of words in either direction, of which the fastest counts.
_ROUNDS = 100
_WIDTH = 512


@dataclass(frozen=True)
class Offset:
    """The clock of a rank less that of rank 0, and how long a word takes from one to the other,
    both in nanoseconds.
    """

    clock: float
    hop: float


def stamped(peers: Peers) -> Peers:
    """The same ranks in kernels that note the time: int64 ``stamps_X2`` ``[64 · 256, 2]``, by step
    and exchange, when this rank pushed its last word and found the last one of all; 0: never.
    """
    shape = (STEPS * MOST_EXCHANGES, 2)
    stamps_X2 = torch.zeros(shape, dtype=torch.int64, device=peers.table_P.device)
    address = torch.full_like(peers.table_P[:1], stamps_X2.data_ptr())
    return replace(peers, table_P=torch.cat([peers.table_P, address]), stamps_X2=stamps_X2)


def offset(devices: Sequence[torch.device]) -> Offset:
    """Of the second of two GPUs, which have nothing else to do. A rank whose own words are there
    finds those of the other one as soon as they arrive: so either of them is late in turn.
    """
    known = KnownExchanges(devices, _WIDTH, exchanges=2, view=stamped)
    known.run()
    known.wrong()
    first, second = (min(_way(known, late) for _ in range(_ROUNDS)) for late in range(2))
    return Offset((first - second) / 2, (first + second) / 2)


def _way(known: KnownExchanges, late: int) -> int:
    """From the last word that rank ``late`` pushes to the last one that the other rank finds, each
    by its own clock.
    """
    known.run_rank(1 - late)
    known.run_rank(late)
    known.wrong()
    sender = known.peers[late]
    receiver = known.peers[1 - late]
    step = int(sender.step_4[0]) % STEPS
    return int(moments(receiver)[step, 0, FOUND] - moments(sender)[step, 0, PUSHED])


def moments(peers: Peers) -> Tensor:
    """The stamps of a rank on the host, int64 ``[64, 256, 2]``."""
    assert peers.stamps_X2 is not None, "these kernels note no time"
    return peers.stamps_X2.cpu().view(STEPS, MOST_EXCHANGES, 2)
