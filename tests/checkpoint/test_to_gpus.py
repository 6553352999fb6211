"""Spans of files to GPUs: the copier on the CPU, which begins, waits and ends as on them."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from dsv4.checkpoint import to_gpus
from dsv4.checkpoint import transfer as module
from dsv4.checkpoint.background_reads import BackgroundReads
from dsv4.checkpoint.pieces import Piece, Span
from dsv4.checkpoint.staging import TABLE_BYTES
from dsv4.checkpoint.transfer import Transfer
from dsv4.errors import UserError
from tests.checkpoint.folders import CPU
from tests.checkpoint.lanes_on_the_cpu import put_lanes_on_the_cpu
from tests.checkpoint.shuffled import (
    Reports,
    assert_filled,
    long_transfer,
    memory,
    shuffled_pieces,
)

READERS = 3


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGING_BYTES", 100)


@pytest.fixture(params=[True, False], ids=["by table", "by torch"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Transfer]:
    """``Transfer`` as to GPUs, with and without a kernel for them, which copies to the CPU."""
    by_table: bool = request.param

    class Copying(Transfer):
        def __enter__(self) -> Self:
            self._devices = [CPU]
            return super().__enter__()

    put_lanes_on_the_cpu(monkeypatch, by_table)
    monkeypatch.setattr(to_gpus, "_new_streams", lambda _: nullcontext([]))
    monkeypatch.setattr(to_gpus, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    return Copying


def threads_of_loads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("dsv4-load")]


def test_one_thread_copies_what_others_read(files: list[Path], copier: type[Transfer]) -> None:
    for _ in range(20):
        pieces = shuffled_pieces(files) + shuffled_pieces(files)
        named = [piece._replace(name=str(at % 7)) for at, piece in enumerate(pieces)]
        filled: list[str] = []
        read: list[int] = []
        with copier(named, read.append, filled.append, READERS) as moving:
            moving.wait("3")
            assert_filled([piece for piece in named if piece.name == "3"])
        assert sorted(filled) == sorted({piece.name for piece in named if piece.nbytes})
        assert_filled(pieces)
        assert sum(read) == 2 * 2 * 5000
        assert threads_of_loads() == []


@pytest.mark.parametrize("readers", [1, READERS])
def test_errors_of_readers_of_the_copier_and_beside_them_end_all(
    files: list[Path], tmp_path: Path, copier: type[Transfer], readers: int
) -> None:
    broken = Piece.whole(tmp_path / "0", 0, memory(1))
    reports = Reports()
    with (
        pytest.raises(UserError, match="0: cannot be read"),
        copier([*long_transfer(files), broken], reports, readers=readers),
    ):
        pass
    assert threads_of_loads() == []

    def fail(nbytes: int) -> None:
        if reports.count % 10 == 9:
            raise BrokenPipeError(32, "Broken pipe")
        reports(nbytes)

    with pytest.raises(BrokenPipeError), copier(long_transfer(files), fail, readers=readers):
        pass
    with pytest.raises(ZeroDivisionError), copier(long_transfer(files), reports, readers=readers):
        _ = 1 // int(reports.count > len(files) * 100_000)
    assert threads_of_loads() == []


def test_what_is_being_read_when_no_span_is_left_arrives(
    files: list[Path], copier: type[Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone span, whose read takes longer than the first look at it."""
    finished = BackgroundReads.finished
    looks = iter([False])

    def later(reads: BackgroundReads, seconds: float) -> list[int]:
        return finished(reads, seconds) if next(looks, True) else []

    monkeypatch.setattr(BackgroundReads, "finished", later)
    piece = Piece.whole(files[0], 0, memory(100))
    with copier([piece], lambda _: None):
        pass
    assert_filled([piece])


def test_a_buffer_is_not_free_before_its_last_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several devices, the last of which is late: its bytes would be those of another span."""
    monkeypatch.setattr(to_gpus, "_pinned", memory)
    nbytes = 2 * TABLE_BYTES
    late = [False]
    events = [
        SimpleNamespace(query=lambda: True, synchronize=lambda: None),
        SimpleNamespace(query=lambda: late[0], synchronize=lambda: None),
    ]
    room: list[int] = []
    lanes: Any = SimpleNamespace(queue=lambda span, buffer: events)
    reads: Any = SimpleNamespace(
        begin=lambda slot, file, offset, into: room.append(into.nbytes),
        finished=lambda seconds: [0],
    )
    arrived: list[Span] = []
    moving = to_gpus._Moving(lanes, reads, nbytes, 1, arrived.extend)
    span = Span(Path("a"), 0, nbytes, ())
    moving.begin(span)
    moving.go_on()
    moving.go_on()
    assert (room, arrived, moving.is_busy) == ([nbytes], [], True)
    late[0] = True
    moving.go_on()
    assert (arrived, moving.is_busy) == ([span], False)
