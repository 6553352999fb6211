"""The memory that a load passes, as a plan counts it."""

from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import transfer
from dsv4.checkpoint.pieces import GAP, Piece
from dsv4.checkpoint.staging import (
    LANES,
    MORE_BUFFERS,
    STAGING_BYTES,
    TABLE_BYTES,
    reader_count,
    staging_bytes,
    staging_on,
)
from tests.checkpoint.shuffled import memory

GPU = torch.device("cuda")
BUFFER = STAGING_BYTES + TABLE_BYTES


@pytest.mark.parametrize(("cores", "readers"), [(None, 2), (1, 2), (4, 2), (8, 6), (96, 16)])
def test_readers_leave_cores_to_others_and_are_no_more_than_memory_feeds(
    cores: int | None, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert reader_count() == readers


def test_a_load_takes_no_more_buffers_and_no_larger_ones_than_it_has_bytes_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for nbytes, readers in ((STAGING_BYTES, 1), (STAGING_BYTES + 1, 2), (1 << 40, 6)):
        assert staging_bytes(nbytes) == (readers + MORE_BUFFERS) * BUFFER
        assert staging_on(torch.device("cpu"), nbytes) == staging_bytes(nbytes)
        assert staging_on(GPU, nbytes) == LANES * BUFFER
    assert staging_bytes(100) == (1 + MORE_BUFFERS) * (100 + TABLE_BYTES)
    assert staging_on(GPU, 100) == LANES * (100 + TABLE_BYTES)


def test_buffers_are_as_small_as_the_bytes_and_never_larger_than_one_is_to_be(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 100)

    def buffer(nbytes: int) -> int:
        piece = Piece.whole(files[0], 0, memory(nbytes), "a")
        return transfer.Transfer([piece], lambda _: None)._buffer_bytes

    assert buffer(99) == 100
    assert buffer(5000) == 100
    assert 10 <= buffer(10) <= 10 + GAP
