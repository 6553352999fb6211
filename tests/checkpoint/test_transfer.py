"""Bytes from files to memory: sequential, whole, and stopped by the first error or Ctrl-C."""

import gc
import signal
import threading
import time
import weakref
from contextlib import suppress
from io import FileIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.checkpoint import transfer as module
from dsv4.checkpoint.background_reads import open_sequential
from dsv4.checkpoint.pieces import Piece, Share
from dsv4.checkpoint.transfer import Transfer, transfer
from dsv4.errors import UserError
from tests.checkpoint.shuffled import Reports, assert_filled, long_transfer, memory, shuffled_pieces

READERS = 3


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGING_BYTES", 100)


@pytest.mark.parametrize(("rows", "width"), [(1, 4990), (49, 100), (9, 500), (499, 10), (71, 70)])
def test_shares_get_their_columns_of_every_row(files: list[Path], rows: int, width: int) -> None:
    """Rows that fit, that fit several at once, and that are longer than a buffer."""
    edges = [0, width // 3, width // 2, width]
    shares = [
        Share(memory(rows * (stop - first)), first, stop)
        for first, stop in [*pairwise(edges), (0, width), (width // 4, width // 4 * 3)]
    ]
    read = []
    transfer([Piece(files[0], 7, rows, width, tuple(shares))], read.append)
    stored = np.frombuffer(files[0].read_bytes()[7:][: rows * width], np.uint8)
    for target, first, stop in shares:
        expected = stored.reshape(rows, width)[:, first:stop]
        assert np.array_equal(target.numpy().reshape(expected.shape), expected), (first, stop)
    assert sum(read) == rows * width


def test_every_target_gets_its_bytes_and_all_are_counted(files: list[Path]) -> None:
    pieces = shuffled_pieces(files) + shuffled_pieces(files)
    counted = []
    names = set()

    def count(nbytes: int) -> None:
        counted.append(nbytes)
        names.add(threading.current_thread().name)

    transfer(pieces, count, READERS)
    assert_filled(pieces)
    assert sum(counted) == 2 * 2 * 5000
    assert threading.main_thread().name not in names


@pytest.mark.gpu
def test_pinned_buffers_take_turns_without_losing_bytes(files: list[Path]) -> None:
    """Many more batches than buffers, of every GPU, and on memory made in inference mode."""
    with torch.inference_mode():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        pieces = [piece for device in devices for piece in shuffled_pieces(files, device)]
        rows, width = 40, 100
        columns = [Share(memory(rows * 30, device), 20, 50) for device in devices]
        pieces.append(Piece(files[0], 11, rows, width, tuple(columns)))
    transfer(pieces, lambda _: None, READERS)
    assert_filled(pieces[:-1])
    stored = np.frombuffer(files[0].read_bytes()[11:][: rows * width], np.uint8)
    for target, first, stop in columns:
        expected = stored.reshape(rows, width)[:, first:stop]
        assert np.array_equal(target.cpu().numpy().reshape(expected.shape), expected)


def test_nothing_to_move_is_no_error() -> None:
    transfer([], lambda _: None)


def test_a_reader_has_one_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FileIO] = []
    counts: list[int] = []

    def counted(path: Path) -> FileIO:
        opened.append(open_sequential(path))
        counts.append(sum(not file.closed for file in opened))
        return opened[-1]

    monkeypatch.setattr(module, "open_sequential", counted)
    paths = [tmp_path / str(number) for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    pieces = [Piece.whole(path, 0, memory(100)) for path in paths]
    transfer(pieces, lambda _: None, READERS)
    assert_filled(pieces)
    assert max(counts) <= READERS
    assert all(file.closed for file in opened)


def test_missing_and_short_files_are_one_line(files: list[Path]) -> None:
    files[0].unlink()
    with pytest.raises(UserError, match=r"/b: cannot be read \(No such file or directory\)$"):
        transfer([Piece.whole(files[0], 0, memory(1))], lambda _: None)
    with pytest.raises(
        UserError, match=r"/a: truncated: found 5000 bytes, expected at least 5050$"
    ):
        transfer([Piece.whole(files[1], 4950, memory(100))], lambda _: None)
    with pytest.raises(UserError, match=r"/a: truncated: found 5000 bytes, expected at least 6100"):
        transfer([Piece.whole(files[1], 6000, memory(100))], lambda _: None)


def test_first_error_ends_the_other_threads(files: list[Path], tmp_path: Path) -> None:
    reports = Reports()
    broken = Piece.whole(tmp_path / "0", 0, memory(1))
    with pytest.raises(UserError, match="0: cannot be read"):
        transfer([*long_transfer(files), broken], reports, READERS)
    assert reports.count < 250
    assert not any(thread.name.startswith("dsv4-load") for thread in threading.enumerate())


def test_error_in_the_report_is_raised_as_it_is(files: list[Path]) -> None:
    def fail(nbytes: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        transfer([Piece.whole(files[1], 0, memory(100))], fail)


def test_what_waits_for_a_name_gets_it_whole_while_others_are_read(files: list[Path]) -> None:
    pieces = [
        piece._replace(name=f"part {at % 5}") for at, piece in enumerate(long_transfer(files))
    ]
    filled: list[str] = []
    reports = Reports()
    with Transfer(pieces, reports, filled.append, READERS) as moving:
        moving.wait("part 0")
        assert "part 0" in filled
        assert_filled([piece for piece in pieces if piece.name == "part 0"])
        moving.wait("no such part")
    assert sorted(filled) == [f"part {at}" for at in range(5)]
    assert_filled(pieces)


def test_what_waits_for_a_name_has_it_behind_what_is_told_of_it(files: list[Path]) -> None:
    begun = threading.Event()
    told: list[str] = []

    def tell(name: str) -> None:
        begun.set()
        time.sleep(0.05)
        told.append(name)

    pieces = [Piece.whole(files[0], 100 * at, memory(100), name) for at, name in enumerate("ab")]
    with Transfer(pieces, lambda _: None, tell, readers=1) as moving:
        begun.wait()
        moving.wait("a")
        assert "a" in told


def test_an_error_reaches_what_waits(files: list[Path], tmp_path: Path) -> None:
    last = Piece.whole(tmp_path / "z", 0, memory(1), "last")
    with (
        pytest.raises(UserError, match="z: cannot be read"),
        Transfer([*shuffled_pieces(files), last], lambda _: None) as moving,
    ):
        moving.wait("last")


def test_an_error_beside_the_threads_ends_them(files: list[Path]) -> None:
    reports = Reports()
    with pytest.raises(ZeroDivisionError), Transfer(long_transfer(files), reports):
        _ = 1 // int(reports.count > len(files) * 1000)
    assert reports.count < 500
    assert not any(thread.name.startswith("dsv4-load") for thread in threading.enumerate())


def test_an_error_keeps_no_target_alive(files: list[Path], tmp_path: Path) -> None:
    """Also before the garbage is collected: what is read instead needs the memory."""
    target = memory(100)
    alive = weakref.ref(target)
    gc.disable()
    try:
        with suppress(UserError):
            transfer([Piece.whole(tmp_path / "missing", 0, target, "x")], lambda _: None)
        del target
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all_threads(files: list[Path]) -> None:
    reports = Reports()
    once = iter([True])

    def report(nbytes: int) -> None:
        reports(nbytes)
        if reports.count >= 30 and next(once, False):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        transfer(long_transfer(files), report, READERS)
    assert reports.count < 500
    assert not any(thread.name.startswith("dsv4-load") for thread in threading.enumerate())
