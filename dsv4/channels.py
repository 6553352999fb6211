"""Channels: how rows go from one device to another inside a decode step, without the host.

The sender writes words {tag, 32 bits} into memory of the receiver, which waits for each of them
(``dsv4/ops/channel/``). A tag is the number of the use: both ends count their uses, each on its
device, and the host sets all counts to a number that none has reached where a run may leave them
apart (``align``). A use overwrites the words of the one before. Nobody sends before those are read,
because a step needs what they led to: its tokens, or, given by the host, the end of all that is
queued on the head's device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.turns import Turns

Ends = tuple[torch.device, torch.device]
# Set, sender, receiver, use.
_FAULT_WORDS = 4
WORD_BYTES = 8
# What a word has of the rows.
VALUE_BYTES = 4
HALF_BYTES = 2
COUNT_BYTES = 8
_COUNTS = 1 << 32


def value_bytes(nbytes: int) -> int:
    """What a word has of ``nbytes`` of rows: half as much where they are no whole values, as those
    of one token of an odd width in 16 bit.
    """
    return VALUE_BYTES if nbytes % VALUE_BYTES == 0 else HALF_BYTES


@dataclass(frozen=True)
class Channel:
    """From ``source`` to ``target``.

    ``words_W`` int64: room for the longest rows, in memory of the target. ``sent_1`` and
    ``received_1`` int64 ``[1]``: the number of the next use, in the upper half, on either device.
    ``fault_4`` int32, pinned: what a kernel that gave up waiting says (set, sender, receiver, use).
    """

    source: torch.device
    target: torch.device
    words_W: Tensor
    sent_1: Tensor
    received_1: Tensor
    fault_4: Tensor


class Channels:
    """Those between the devices of a model."""

    def __init__(self, words: Mapping[Ends, Tensor], turns: Turns) -> None:
        """``words``: the memory of each channel, where its target has memory, or of a plan that has
        none. ``turns``: of the engine on these devices.
        """
        first, *_ = words.values()
        host = "meta" if first.is_meta else "cpu"
        pinned = first.is_cuda
        self.fault_4 = torch.zeros(_FAULT_WORDS, dtype=torch.int32, device=host, pin_memory=pinned)
        self._turns = turns
        ends = [(device, channel) for channel in words for device in channel]
        devices = tuple(dict.fromkeys(device for device, _ in ends))
        homes = {target: memory.device for (_, target), memory in words.items()}
        self._counts = {
            device: torch.empty(
                sum(device in channel for channel in words), dtype=torch.int64, device=homes[device]
            )
            for device in devices
        }
        counts = {device: iter(own.split(1)) for device, own in self._counts.items()}
        self._of = {
            (source, target): Channel(
                source, target, memory, next(counts[source]), next(counts[target]), self.fault_4
            )
            for (source, target), memory in words.items()
        }
        # Memory begins as zeros, which are words of use 0.
        self._begun = 1
        self.align()

    def between(self, source: torch.device, target: torch.device) -> Channel:
        """The one from ``source`` to ``target``."""
        return self._of[source, target]

    @property
    def all(self) -> tuple[Channel, ...]:
        """Between whichever devices."""
        return tuple(self._of.values())

    def align(self) -> None:
        """Queues that both ends of every channel count from one number on, on the current streams:
        of a use that is still to come.
        """
        number = self._begun % _COUNTS
        signed = number - _COUNTS if number >= _COUNTS // 2 else number
        for counts in self._counts.values():
            counts.fill_(signed * _COUNTS)

    @contextmanager
    def turn(self, uses: int = 0) -> Iterator[None]:
        """Around queueing what uses no channel more than so many times."""
        self._begun += uses
        with self._turns.taken():
            yield


@contextmanager
def naming_lost_words(channels: Channels | None) -> Iterator[None]:
    """Around waiting for a device: ``RuntimeError`` where a kernel has waited for words in vain."""
    try:
        yield
    except torch.AcceleratorError as error:
        is_set, source, target, use = (0,) * 4 if channels is None else channels.fault_4.tolist()
        if not is_set:
            raise
        missing = f"words of cuda:{source} for cuda:{target} did not come (use {use})"
        raise RuntimeError(f"CUDA error: {missing}") from error
