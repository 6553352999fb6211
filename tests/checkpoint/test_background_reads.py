"""Reads that go on beside the interpreter: whole, of any file, and over when they must be."""

import ctypes
import errno
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint.background_reads import BackgroundReads
from dsv4.errors import UserError
from tests.checkpoint.shuffled import memory

LONG = 60.0


def all_of(reads: BackgroundReads) -> list[int]:
    found: list[int] = []
    while len(reads):
        found += reads.finished(LONG)
    return found


def test_every_slot_gets_its_bytes_of_one_file_after_another(files: list[Path]) -> None:
    expected = [file.read_bytes() for file in files]
    with BackgroundReads(5) as reads:
        for turn in range(40):
            targets = [memory(100 + slot) for slot in range(5)]
            for slot, target in enumerate(targets):
                reads.begin(slot, files[(turn + slot) % 2], 17 * turn + slot, target)
            assert len(reads) == 5
            assert sorted(all_of(reads)) == [0, 1, 2, 3, 4]
            for slot, target in enumerate(targets):
                start = 17 * turn + slot
                found = target.numpy().tobytes()
                assert found == expected[(turn + slot) % 2][start : start + 100 + slot]


def test_nothing_to_wait_for_is_no_wait() -> None:
    with BackgroundReads(3) as reads:
        assert reads.finished(LONG) == []


@pytest.mark.parametrize(("nbytes", "most"), [(1000, 333), (4, 1)])
def test_what_is_read_in_parts_is_read_to_its_end(
    files: list[Path], nbytes: int, most: int
) -> None:
    target = memory(nbytes)
    with BackgroundReads(1) as reads:
        count = reads._library.aio_return
        counted: list[int] = []

        def some(request: object) -> int:
            counted.append(min(count(request), most))
            return counted[-1]

        reads._library.aio_return = some
        reads.begin(0, files[0], 20, target)
        assert all_of(reads) == [0]
    assert counted == [*[most] * 3, nbytes - 3 * most]
    assert target.numpy().tobytes() == files[0].read_bytes()[20:][:nbytes]


def test_a_read_that_does_not_begin_is_one_line_and_none_that_runs(files: list[Path]) -> None:
    def refuse(_: object) -> int:
        ctypes.set_errno(errno.EAGAIN)
        return -1

    with BackgroundReads(1) as reads:
        read = reads._library.aio_read
        reads._library.aio_read = refuse
        with pytest.raises(UserError, match=r"/b: cannot be read \(Resource temporarily unavail"):
            reads.begin(0, files[0], 0, memory(4))
        assert len(reads) == 0
        reads._library.aio_read = read
        reads.begin(0, files[0], 0, memory(4))
        assert all_of(reads) == [0]


def test_what_cannot_be_read_is_one_line(files: list[Path], tmp_path: Path) -> None:
    with BackgroundReads(2) as reads:
        with pytest.raises(UserError, match=r"/0: cannot be read \(No such file or directory\)$"):
            reads.begin(0, tmp_path / "0", 0, memory(1))
        reads.begin(0, files[0], 4950, memory(100))
        with pytest.raises(
            UserError, match=r"/b: truncated: found 5000 bytes, expected at least 5050$"
        ):
            all_of(reads)
        reads.begin(0, files[0], 6000, memory(100))
        with pytest.raises(UserError, match=r"/b: truncated: found 5000 bytes, expected at least"):
            all_of(reads)
        reads.begin(1, Path("/proc/self/mem"), 0, memory(1))
        with pytest.raises(UserError, match=r"/mem: cannot be read \(Input/output error\)$"):
            all_of(reads)
        assert len(reads) == 0


def test_the_end_waits_for_what_is_written(files: list[Path]) -> None:
    targets = torch.zeros(8, 1 << 20, dtype=torch.uint8)
    files[0].write_bytes(bytes([7]) * targets.numel())
    with BackgroundReads(8) as reads:
        for slot, target in enumerate(targets):
            reads.begin(slot, files[0], slot << 20, target)
    assert bool((targets == 7).all())


def test_the_end_waits_as_long_as_a_read_goes_on(files: list[Path]) -> None:
    target = memory(100)
    answers = iter([errno.EINPROGRESS, errno.EINPROGRESS, 0])
    waits: list[bool] = []
    with BackgroundReads(1) as reads:
        suspend = reads._library.aio_suspend

        def wait(*arguments: object) -> None:
            suspend(*arguments)
            waits.append(target.numpy().tobytes() == files[0].read_bytes()[:100])

        reads.begin(0, files[0], 0, target)
        reads._library.aio_error = lambda _: next(answers)
        reads._library.aio_suspend = wait
    assert waits == [True, True]
