"""Channels on the host: their numbers, and what it says of words that did not come."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from dsv4.channels import COUNT_BYTES, Channels, naming_lost_words
from dsv4.turns import Turns
from tests.ops.channel.made import RECEIVER, SENDER, channels_on_cpu, lost_words, wait_for_trapped

WAYS = ((SENDER, RECEIVER), (RECEIVER, SENDER))


def numbers(channels: Channels) -> set[int]:
    """Of the next use, at all ends."""
    found = [channels.between(*ends) for ends in WAYS]
    ends = [count for one in found for count in (one.sent_1, one.received_1)]
    assert all(int(count) % (1 << 32) == 0 for count in ends)
    return {(int(count) >> 32) % (1 << 32) for count in ends}


def test_every_end_has_a_count_of_its_own() -> None:
    channels = channels_on_cpu()
    ends = [channels.between(*ends) for ends in WAYS]
    counts = [count for one in ends for count in (one.sent_1, one.received_1)]
    assert len({count.data_ptr() for count in counts}) == 4
    memory = [count.untyped_storage() for count in counts]
    assert sum({one.data_ptr(): one.nbytes() for one in memory}.values()) == 4 * COUNT_BYTES
    assert channels.all == tuple(ends)


def test_numbers_are_of_uses_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run that was interrupted left: those of both ends are alike, and not of words that
    are there.
    """
    monkeypatch.setattr(Turns, "taken", lambda _: nullcontext())
    channels = channels_on_cpu()
    assert numbers(channels) == {1}
    for uses in (3, 0, 4):
        with channels.turn(uses):
            channels.between(*WAYS[0]).sent_1.add_(uses << 32)
    channels.align()
    assert numbers(channels) == {8}


def test_a_count_is_where_its_end_is() -> None:
    """A kernel counts in memory of its own device."""
    words = {
        ends: torch.zeros(8, dtype=torch.int64, device=home)
        for ends, home in zip(WAYS, ("cpu", "meta"), strict=True)
    }
    channels = Channels(words, Turns((SENDER, RECEIVER)))
    to_receiver, to_sender = channels.all
    homes = [count.device.type for count in (to_receiver.sent_1, to_receiver.received_1)]
    assert homes == ["meta", "cpu"]
    homes = [count.device.type for count in (to_sender.sent_1, to_sender.received_1)]
    assert homes == ["cpu", "meta"]


def test_uses_that_are_interrupted_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows which of them a device has done. They are counted in the engine's turn."""
    taken: list[Turns] = []

    def noted(turns: Turns) -> AbstractContextManager[None]:
        taken.append(turns)
        return nullcontext()

    monkeypatch.setattr(Turns, "taken", noted)
    turns = Turns((SENDER, RECEIVER))
    memory = {ends: torch.zeros(8, dtype=torch.int64) for ends in WAYS}
    channels = Channels(memory, turns)
    with pytest.raises(KeyboardInterrupt), channels.turn(3):
        raise KeyboardInterrupt
    channels.align()
    assert numbers(channels) == {4}
    assert taken == [turns]


@pytest.mark.parametrize("begun", [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 3 << 31])
def test_numbers_begin_anew_behind_the_last_one(begun: int) -> None:
    channels = channels_on_cpu()
    channels._begun = begun
    channels.align()
    assert numbers(channels) == {begun % (1 << 32)}


def lose(channels: Channels | None) -> None:
    with naming_lost_words(channels):
        wait_for_trapped()


def test_words_that_did_not_come_are_named() -> None:
    expected = r"^CUDA error: words of cuda:3 for cuda:1 did not come \(use 77\)$"
    with pytest.raises(RuntimeError, match=expected) as found:
        lose(lost_words())
    assert isinstance(found.value.__cause__, torch.AcceleratorError)
    for channels in (channels_on_cpu(), None):
        with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
            lose(channels)
