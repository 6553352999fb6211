"""Of which tokens of a prefill step a rank computes the seams, and chooses the entries.

Ranks take tiles of tokens in turn, so that they have as many whatever the length of a step. Streams
stay where they are; what a sublayer reads goes to all ranks, and so do the indexer's choices.
"""

from dataclasses import dataclass

from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.constants import TOKEN_TILE
from dsv4.launch.kernel import Defines
from dsv4.launch.recording import Recording


@dataclass(frozen=True)
class TokenShare:
    """The tiles ``owner``, ``owner + owners``, … of the tokens; of a lone owner all of them."""

    owner: int
    owners: int

    @property
    def defines(self) -> Defines:
        """What kernels are compiled with."""
        return (("OWNERS", self.owners),) if self.owners > 1 else ()

    @property
    def sender_defines(self) -> Defines:
        """The same for kernels that write rows to all ranks."""
        return (("RANKS", self.owners), *self.defines) if self.owners > 1 else ()

    def tiles(self, tokens: int) -> int:
        """The most tiles that an owner has."""
        return ceil_div(ceil_div(tokens, TOKEN_TILE), self.owners)

    def rows(self, tokens: int) -> int:
        """The most tokens that an owner has, of whole tiles where there are several owners."""
        return tokens if self.owners == 1 else self.tiles(tokens) * TOKEN_TILE

    def tokens(self, tokens: int) -> int:
        """How many of the first ``tokens`` are the owner's."""
        turns, rest = divmod(tokens, self.owners * TOKEN_TILE)
        return turns * TOKEN_TILE + min(max(0, rest - self.owner * TOKEN_TILE), TOKEN_TILE)

    def token(self, own: int) -> int:
        """The owner's token number ``own``, from 0."""
        tile, within = divmod(own, TOKEN_TILE)
        return (tile * self.owners + self.owner) * TOKEN_TILE + within

    def spans(self, first: int, tokens: int) -> list[tuple[int, int]]:
        """The owner's rows of ``tokens``, from ``first`` on, as (start, stop)."""
        starts = range(self.owner * TOKEN_TILE, tokens, self.owners * TOKEN_TILE)
        found = [(max(start, first), min(start + TOKEN_TILE, tokens)) for start in starts]
        return [(start, stop) for start, stop in found if start < stop]


WHOLE = TokenShare(0, 1)


def share_of(recording: Recording) -> TokenShare:
    """The share of a rank in the seams of a prefill step."""
    peers = recording.peers
    if peers is None or recording.traced:
        return WHOLE
    return TokenShare(peers.rank, peers.ranks)


def send_rows(recording: Recording, rows: Tensor, memory: Tensor) -> None:
    """``rows`` lie in this rank's ``memory`` of those that all ranks write, and are whole once all
    have written the rows of their tokens.
    """
    recording.place(rows, memory)
    recording.meet()
