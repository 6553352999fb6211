"""How prompts are cut into chunks: all tokens in their order, and as is fastest on devices that
chunks pass through one after another.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.step.chunks import PromptChunks, run_chunks, split_ids


def lengths(tokens: int, largest: int, devices: int) -> list[int]:
    ids = list(range(tokens))
    chunks = PromptChunks(largest, devices).cut(ids)
    assert [token for chunk in chunks for token in chunk] == ids
    return [len(chunk) for chunk in chunks]


def time(found: list[int], devices: int) -> int:
    """Of a chunk on a device after the other, and of a device with one chunk after the other."""
    done = [0] * (devices + 1)
    for length in found:
        for device in range(1, devices + 1):
            done[device] = max(done[device], done[device - 1]) + length + 800
    return done[-1]


@given(tokens=st.integers(0, 9000), largest=st.integers(1, 5000))
def test_one_device_takes_chunks_as_long_as_they_may_be(tokens: int, largest: int) -> None:
    found = lengths(tokens, largest, 1)
    assert all(length == largest for length in found[:-1])
    assert all(1 <= length <= largest for length in found)


@given(tokens=st.integers(1, 9000), devices=st.integers(2, 8))
def test_several_devices_take_the_fastest_halving(tokens: int, devices: int) -> None:
    found = lengths(tokens, 2048, devices)
    cuts = [
        [min(length, tokens - start) for start in range(0, tokens, length)]
        for length in (2048, 1024, 512, 256)
    ]
    assert found in cuts
    assert time(found, devices) == min(time(cut, devices) for cut in cuts)


@pytest.mark.parametrize(
    ("tokens", "devices", "length"),
    [
        *((1024, 2, 1024), (2048, 2, 1024), (8192, 2, 2048)),
        *((512, 8, 256), (1280, 8, 256), (2048, 8, 512), (8192, 8, 1024)),
    ],
)
def test_lengths_of_usual_prompts(tokens: int, devices: int, length: int) -> None:
    assert lengths(tokens, 2048, devices) == [length] * (tokens // length)


def test_short_chunks_are_not_halved() -> None:
    assert lengths(1000, 500, 8) == [500, 500]
    assert lengths(1000, 1, 8) == [1] * 1000


def test_sizes_that_are_asked_for_are_taken_as_far_as_they_may_be() -> None:
    assert split_ids([*range(10)], [7, 3], 4) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    expected = r"^chunk_sizes: found \[7, 4\], expected positive integers that sum to 10$"
    with pytest.raises(ValueError, match=expected):
        split_ids([*range(10)], [7, 4], 4)


def test_the_host_waits_for_the_oldest_of_too_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it tells of a chunk comes behind that."""
    log: list[object] = []

    class Event:
        """Behind a chunk: its stand-in for hidden states names it as their device."""

        def record(self, chunk: object) -> None:
            self.chunk = chunk
            log.append(f"queued {chunk}")

        def synchronize(self) -> None:
            log.append(f"waited for {self.chunk}")

    def run(chunk: Any) -> Any:
        return SimpleNamespace(is_cuda=True, device=chunk)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    chunks = [[0, 1], [2], [3]]
    found: Any = run_chunks(run, chunks, 1, lambda done, total: log.append((done, total)))
    assert found.device == [3]
    assert log == [
        *("queued [0, 1]", (2, 4)),
        *("queued [2]", "waited for [0, 1]", (3, 4)),
        *("queued [3]", "waited for [2]", (4, 4)),
    ]
