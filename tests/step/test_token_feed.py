"""Where the tokens of a step come from, on stand-ins for streams."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.step import token_feed
from dsv4.step.token_feed import TokenFeed
from tests.ops.channel.made import channels_on_cpu

HEAD = torch.device("cpu")
OTHER = torch.device("meta")


class Stream:
    """Notes what its device waits for."""

    def __init__(self, device: torch.device, log: list[Any]) -> None:
        self.device = device
        self._log = log

    def record_event(self) -> torch.device:
        return self.device

    def wait_event(self, event: torch.device) -> None:
        self._log.append((self.device, event))


class Torch:
    """torch without pinned memory, whose streams note in ``log``."""

    def __init__(self, log: list[Any], make_event: Callable[[], Any]) -> None:
        self.cuda = SimpleNamespace(
            Event=make_event, current_stream=lambda device: Stream(device, log)
        )

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return self._unpinned(found) if name in ("zeros", "ones") else found

    @staticmethod
    def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*shape, **options)

        return made


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Which device has waited for which."""
    found: list[Any] = []
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(token_feed, "torch", Torch(found, lambda: event))
    monkeypatch.setattr(token_feed, "HandOff", HandedOn)
    return found


class HandedOn:
    """Notes what is sent."""

    def __init__(self, source: torch.device, _arrived: torch.Tensor) -> None:
        self.source = source
        self.sent: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor)


class Input:
    """Of a device that copies when somebody waits for it."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.queued: list[torch.Tensor] = []

    def __getitem__(self, places: slice) -> "Input":
        return self

    def copy_(self, pinned: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.queued.append(pinned)

    def wait(self, count: int) -> None:
        """For the first so many copies."""
        self.read += [pinned.tolist() for pinned in self.queued[len(self.read) : count]]


class Recorded:
    """An event behind the copies that a device has queued."""

    def __init__(self, inputs: dict[torch.device, Input]) -> None:
        self._inputs = inputs
        self._behind: tuple[Input, int] | None = None

    def record(self, stream: Stream) -> None:
        found = self._inputs[stream.device]
        self._behind = (found, len(found.queued))

    def synchronize(self) -> None:
        if self._behind is not None:
            found, count = self._behind
            found.wait(count)


def feed(tokens: int, with_channels: bool = True) -> TokenFeed:
    channels = channels_on_cpu() if with_channels else None
    return TokenFeed((OTHER, HEAD), HEAD, tokens, channels=channels)


def test_given_tokens_of_a_decode_step_come_behind_all_that_the_head_has_queued(
    log: list[Any],
) -> None:
    """What the steps in front have sent is read by then."""
    for tokens in (1, 5, 8):
        feed(tokens).put([3])
        assert log == [(OTHER, HEAD)], tokens
        log.clear()


def test_chunks_of_a_prompt_do_not_wait_for_those_in_front(log: list[Any]) -> None:
    feed(512).put([3, 4])
    feed(1, with_channels=False).put([3])
    assert log == []


def test_the_host_says_that_it_has_given_a_token(log: list[Any]) -> None:
    one = feed(1)
    ((ends, given_1),) = one.given.items()
    assert (ends, given_1.device, given_1.shape) == ((HEAD, OTHER), OTHER, (1,))
    one.given = {ends: torch.zeros(1, dtype=torch.int64)}
    one.put([7])
    copied = [int(found) for found in one.given.values()]
    assert (copied, one.inputs[HEAD].tolist()) == ([1], [7])


def test_who_has_no_channel_is_handed_the_token(log: list[Any]) -> None:
    assert not feed(1)._hand_offs
    assert [one.source for one in feed(1, with_channels=False)._hand_offs] == [HEAD]
    assert [one.source for one in feed(2)._hand_offs] == [HEAD]
    # Steps with drafts have their input in memory of the draft module.
    memory = {device: torch.zeros(8, dtype=torch.int64, device=device) for device in (OTHER, HEAD)}
    drafted = TokenFeed((OTHER, HEAD), HEAD, 1, memory, channels_on_cpu())
    assert (drafted.given, len(drafted._hand_offs)) == ({}, 1)
    assert drafted.inputs[HEAD].shape == (1,)
    assert drafted.inputs[HEAD].data_ptr() == memory[HEAD].data_ptr()


def test_what_is_handed_on_is_the_head_s_token(log: list[Any]) -> None:
    handed: Any = feed(2)
    handed.pass_on()
    ((sent,),) = [one.sent for one in handed._hand_offs]
    assert sent is handed.inputs[HEAD]


def test_no_token_is_given_before_the_host_says_so() -> None:
    inputs = {device: torch.zeros(1, dtype=torch.int64) for device in (HEAD, OTHER)}
    given = token_feed.given_by_host(inputs, HEAD, channels_on_cpu())
    assert [int(given_1) for given_1 in given.values()] == [0]


def test_pinned_memory_is_written_again_when_every_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host waits for nothing before it comes round."""
    inputs = {device: Input() for device in (HEAD, OTHER)}
    monkeypatch.setattr(token_feed, "HandOff", HandedOn)
    monkeypatch.setattr(token_feed, "torch", Torch([], lambda: Recorded(inputs)))
    one = feed(1, with_channels=False)
    monkeypatch.setattr(one, "inputs", inputs)
    for token in range(10):
        one.put([token])
        assert [len(found.read) for found in inputs.values()] == [max(0, token - 3)] * 2
    for found in inputs.values():
        found.wait(10)
        assert found.read == [[token] for token in range(10)]
