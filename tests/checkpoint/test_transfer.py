"""Bytes from files to memory: sequential, whole, and stopped by the first error or Ctrl-C."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import transfer as module
from dsv4.checkpoint.transfer import Piece, batches, in_file_order, transfer
from dsv4.errors import UserError
from tests.checkpoint.folders import CPU

# The CPU under other names: devices as far as the threads are concerned.
DEVICES = [torch.device("cpu", index) for index in range(3)]


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGING_BYTES", 100)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("b", "a")]
    for seed, path in enumerate(paths):
        path.write_bytes(random.Random(seed).randbytes(5000))
    return paths


def memory(nbytes: int, device: torch.device = CPU) -> Tensor:
    return torch.full((nbytes,), 77, dtype=torch.uint8, device=device)


def shuffled_pieces(files: list[Path], device: torch.device = CPU) -> list[Piece]:
    """Both files in pieces of every kind of size, in no order."""
    pieces = []
    for file in files:
        offset = 0
        for nbytes in (1, 99, 100, 101, 0, 3, 250, 700, 3746):
            pieces.append(Piece(file, offset, memory(nbytes, device)))
            offset += nbytes
    random.Random(0).shuffle(pieces)
    return pieces


def assert_filled(pieces: list[Piece]) -> None:
    for piece in pieces:
        expected = piece.file.read_bytes()[piece.offset : piece.offset + piece.target.numel()]
        assert piece.target.cpu().numpy().tobytes() == expected


def test_pieces_are_read_in_file_order_without_going_back(files: list[Path]) -> None:
    ordered = in_file_order(shuffled_pieces(files))
    assert [piece.file.name for piece in ordered] == ["a"] * 9 + ["b"] * 9
    assert [piece.offset for piece in ordered[:9]] == sorted(piece.offset for piece in ordered[:9])


def test_batches_hold_everything_once_and_never_too_much(files: list[Path]) -> None:
    ordered = in_file_order(shuffled_pieces(files[:1]))
    cut = list(batches(ordered))
    sizes = [sum(piece.target.numel() for piece in batch) for batch in cut]
    assert max(sizes) <= 100
    # Two that follow each other would not fit into one.
    assert all(
        first + batch[0].target.numel() > 100 for first, batch in zip(sizes, cut[1:], strict=False)
    )
    ranges = [
        (piece.offset, piece.offset + piece.target.numel()) for batch in cut for piece in batch
    ]
    assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, 5000)


def test_every_device_gets_its_bytes_and_all_are_counted(files: list[Path]) -> None:
    pieces = {device: shuffled_pieces(files) for device in DEVICES}
    counted = []
    names = set()

    def count(nbytes: int) -> None:
        counted.append(nbytes)
        names.add(threading.current_thread().name)

    transfer(pieces, count)
    for part in pieces.values():
        assert_filled(part)
    assert sum(counted) == 3 * 2 * 5000
    assert threading.main_thread().name not in names


@pytest.mark.gpu
def test_pinned_buffers_take_turns_without_losing_bytes(files: list[Path]) -> None:
    """Many more batches than buffers, of every GPU, and on memory made in inference mode."""
    with torch.inference_mode():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        pieces = {device: shuffled_pieces(files, device) for device in devices}
    transfer(pieces, lambda _: None)
    for part in pieces.values():
        assert_filled(part)


def test_nothing_to_move_is_no_error() -> None:
    transfer({}, lambda _: None)


def test_missing_and_short_files_are_one_line(files: list[Path]) -> None:
    files[0].unlink()
    with pytest.raises(UserError, match=r"/b: cannot be read \(No such file or directory\)$"):
        transfer({CPU: [Piece(files[0], 0, memory(1))]}, lambda _: None)
    with pytest.raises(
        UserError, match=r"/a: truncated: found 5000 bytes, expected at least 5050$"
    ):
        transfer({CPU: [Piece(files[1], 4950, memory(100))]}, lambda _: None)


class Reports:
    """Counts batches slowly enough for whatever is to stop them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, nbytes: int) -> None:
        self.count += 1
        time.sleep(0.005)


def long_transfer(files: list[Path]) -> list[Piece]:
    """1,000 batches."""
    return [Piece(files[1], 0, memory(100)) for _ in range(1000)]


def test_first_error_ends_the_other_threads(files: list[Path], tmp_path: Path) -> None:
    reports = Reports()
    broken = [Piece(tmp_path / "none", 0, memory(1))]
    with pytest.raises(UserError, match="none: cannot be read"):
        transfer({DEVICES[0]: long_transfer(files), DEVICES[1]: broken}, reports)
    assert reports.count < 500
    assert not any(thread.name.startswith("dsv4-load") for thread in threading.enumerate())


def test_error_in_the_report_is_raised_as_it_is(files: list[Path]) -> None:
    def fail(nbytes: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        transfer({CPU: [Piece(files[1], 0, memory(100))]}, fail)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, which background jobs of a shell start without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all_threads(files: list[Path]) -> None:
    reports = Reports()
    once = iter([True])

    def report(nbytes: int) -> None:
        reports(nbytes)
        if reports.count >= 3 and next(once, False):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        transfer({device: long_transfer(files) for device in DEVICES}, report)
    assert reports.count < 1500
    assert not any(thread.name.startswith("dsv4-load") for thread in threading.enumerate())
