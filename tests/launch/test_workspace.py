"""Where buffers lie: never two in one place while both are alive, and no larger than needed."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import storage_key
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.launch.workspace import ALIGNMENT, Layout, lay_out
from tests.launch.simulated_memory import assert_buffers_survive

TARGET = Target(torch.device("cuda", 0), "sm_90a", 132)
Uses = Sequence[Sequence[int]]


def nothing(*_: object) -> None:
    """What a recorded call does here."""


def recorded(
    sizes: Sequence[int], uses: Uses, kept: Sequence[int] = ()
) -> tuple[Recording, list[Tensor]]:
    """Buffers of ``sizes`` bytes; item i names those of ``uses[i]``."""
    recording = Recording(TARGET, 1)
    buffers = [recording.empty((size,), torch.uint8) for size in sizes]
    for indices in uses:
        recording.call(nothing, *(buffers[index] for index in indices))
    for index in kept:
        recording.keep(buffers[index])
    return recording, buffers


def offsets(layout: Layout, buffers: Sequence[Tensor]) -> list[int]:
    return [layout.offsets[storage_key(buffer)] for buffer in buffers]


def alive(sizes: Sequence[int], uses: Uses, kept: Sequence[int]) -> list[set[int]]:
    """The buffers that are there at each item, and at the end of the recording."""
    found = []
    for at in range(len(uses) + 1):
        before = {index for named in uses[: at + 1] for index in named}
        later = {index for named in uses[at:] for index in named}
        ever = {index for named in uses for index in named} | set(kept)
        found.append({index for index in ever if index in before and index in later | set(kept)})
    found[-1] |= set(kept)
    return found


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    """Sizes, uses and what is kept."""
    count = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    indices = st.integers(0, count - 1)
    uses = draw(st.lists(st.lists(indices, max_size=4), max_size=14))
    return sizes, uses, draw(st.lists(indices, max_size=3))


@settings(max_examples=150)
@given(recordings())
@example(([1, 512, 513], [[0], [1], [2]], []))
@example(([100, 200, 300], [], [0, 2]))
@example(([0, 0], [[0, 1], [0]], []))
def test_what_is_alive_together_never_overlaps(
    recording: tuple[list[int], list[list[int]], list[int]],
) -> None:
    sizes, uses, kept = recording
    made, buffers = recorded(sizes, uses, kept)
    layout = lay_out(made)
    assert_buffers_survive(made, layout)
    rounded = [max(1, ceil_div(size, ALIGNMENT)) * ALIGNMENT for size in sizes]
    for together in alive(sizes, uses, kept):
        places = sorted((layout.offsets[storage_key(buffers[at])], rounded[at]) for at in together)
        ends = [offset + size for offset, size in places]
        assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
        assert max(ends, default=0) <= layout.nbytes
    named = {index for indices in uses for index in indices} | set(kept)
    assert len(layout.offsets) == len(named)
    assert layout.nbytes <= sum(rounded[index] for index in named)
    needed = (sum(rounded[at] for at in together) for together in alive(sizes, uses, kept))
    assert layout.nbytes >= max(needed)


def test_memory_is_used_again_by_what_comes_later() -> None:
    made, buffers = recorded([4096, 4096, 1024, 4096], [[0, 1], [1, 2], [2, 3]])
    layout = lay_out(made)
    first, second, third, last = offsets(layout, buffers)
    assert len({first, second}) == 2
    assert last in (first, second)
    assert third == 8192
    assert layout.nbytes == 4096 + 4096 + 1024


def test_buffers_begin_at_multiples_of_512_bytes() -> None:
    """As ``Recording.empty`` says, and what tells whether a view is aligned."""
    made, buffers = recorded([1, 1, 513, 1], [[0, 1, 2, 3]])
    assert sorted(offsets(lay_out(made), buffers)) == [0, 1024, 1536, 2048]
    assert lay_out(made).nbytes == 2560


def test_a_gap_is_filled_to_its_end() -> None:
    made, buffers = recorded([1024] * 3, [[0], [0, 1], [1, 2]])
    assert offsets(lay_out(made), buffers) == [0, 1024, 0]


def test_a_buffer_that_is_kept_lives_to_the_end() -> None:
    uses = [[0], [1], [2]]
    free, _ = recorded([512] * 3, uses)
    kept, buffers = recorded([512] * 3, uses, kept=[0])
    assert lay_out(free).nbytes == 512
    first, *others = offsets(lay_out(kept), buffers)
    assert first not in others
    assert lay_out(kept).nbytes == 1024


def test_views_keep_the_whole_buffer_alive() -> None:
    recording = Recording(TARGET, 8)
    wide = recording.empty((8, 1024), torch.bfloat16)
    other = recording.empty((8, 1024), torch.bfloat16)
    for tensor in (wide[3:4, 512:], other, wide[0]):
        recording.call(nothing, tensor)
    layout = lay_out(recording)
    assert layout.nbytes == 2 * wide.nbytes
    assert_buffers_survive(recording, layout)


def test_only_buffers_take_memory() -> None:
    recording = Recording(TARGET, 1)
    weight = torch.empty(1 << 20, device="meta")
    counters = recording.zeroed("arrivals", 64)
    unused = recording.empty((1 << 20,), torch.float32)
    elsewhere = recording.empty((1 << 20,), torch.float32)
    recording.place(elsewhere, torch.empty(1 << 20, device="meta"))
    small = recording.empty((3,), torch.float32)
    recording.call(nothing, weight, counters, elsewhere, small)
    layout = lay_out(recording)
    assert layout.offsets.keys() == {storage_key(small)}
    assert layout.nbytes == ALIGNMENT
    assert recording.owns(unused)


@pytest.mark.parametrize("count", [0, 1])
def test_a_recording_of_nothing_takes_nothing(count: int) -> None:
    recording = Recording(TARGET, 1)
    for _ in range(count):
        recording.call(nothing)
    assert lay_out(recording) == Layout({}, 0)


def test_two_calls_give_the_same_layout() -> None:
    made, _ = recorded([700, 300, 900, 300], [[0, 1], [1, 2], [2, 3], [3]], kept=[3])
    assert lay_out(made) == lay_out(made)
