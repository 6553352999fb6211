"""The arguments of kernels that push or poll words of an exchange (``exchange.cuh``)."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.launch.kernel import Defines
from dsv4.launch.recording import Recording
from dsv4.peers import Peers

Arguments = dict[str, Tensor | int | None]


@dataclass(frozen=True)
class WordSum:
    """Partial results ``[T, width]`` of all ranks, on their way as words."""

    exchange: int
    tokens: int
    width: int


@dataclass(frozen=True)
class Words:
    """What a kernel is compiled with and gets for an exchange: ``NOT_SENT`` and ``NOT_RECEIVED``
    without one.
    """

    defines: Defines
    arguments: Arguments

    def behind(self, words: int) -> "Words":
        """Those that begin so many words later."""
        slot = self.arguments["slot"]
        assert isinstance(slot, int)
        return Words(self.defines, {**self.arguments, "slot": slot + words if self.defines else 0})


NOT_SENT = Words((), {"peers": None, "slot": 0, "exchange": 0})
NOT_RECEIVED = Words((), {**NOT_SENT.arguments, "rank_words": 0})


def peers_of(recording: Recording) -> Peers:
    """The ranks of a step that they share."""
    assert recording.peers is not None, "a lone rank exchanges nothing"
    return recording.peers


def outgoing(recording: Recording, words: WordSum) -> Words:
    """For the kernel that pushes this rank's part, which is recorded next."""
    return _pushed(recording, words.exchange, peers_of(recording).layout.slot(words.exchange))


def outgoing_rows(recording: Recording) -> tuple[Words, int]:
    """For the kernel that pushes this rank's share of rows that all need, which is recorded next,
    and the number of the words: that of the next sum, in a slot of their own.
    """
    number = recording.exchanges
    return _pushed(recording, number, peers_of(recording).layout.rows_slot), number


def incoming(recording: Recording, words: WordSum) -> Words:
    """For the kernel that polls the parts of all ranks, which is recorded next."""
    return _polled(recording, words.exchange, peers_of(recording).layout.slot(words.exchange))


def incoming_rows(recording: Recording, number: int) -> Words:
    """For the kernel that polls the shares of all ranks, which is recorded next."""
    return _polled(recording, number, peers_of(recording).layout.rows_slot)


def _pushed(recording: Recording, number: int, slot: int) -> Words:
    recording.send()
    peers = peers_of(recording)
    return _words(peers, number, slot + peers.rank * peers.layout.rank_words)


def _polled(recording: Recording, number: int, slot: int) -> Words:
    recording.receive()
    peers = peers_of(recording)
    found = _words(peers, number, slot)
    return Words(found.defines, {**found.arguments, "rank_words": peers.layout.rank_words})


def _words(peers: Peers, number: int, slot: int) -> Words:
    arguments: Arguments = {"peers": peers.table_P, "slot": slot, "exchange": number}
    stamps = peers.stamps_X2
    stamped = () if stamps is None else (("STAMPS", stamps.shape[0]),)
    return Words((("RANKS", peers.ranks), *stamped), arguments)
