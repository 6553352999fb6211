"""Which rows of the head each device multiplies."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.parallel import head_shares
from dsv4.parallel.head_shares import HEAD_START_BYTES, share_head, share_rows
from dsv4.weights.packed import TILE_ROWS, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor, planned_quant_tensor
from dsv4.weights.shared_rows import ROW_UNIT, SharedWeight, shares_of

GPUS = tuple(torch.device("cuda", index) for index in range(8))
BF16 = QuantFormat.BF16
VOCABULARY = 129_280


@given(
    rows=st.integers(1, 20_000).map(lambda tiles: tiles * TILE_ROWS),
    row_bytes=st.integers(1, 1 << 15),
    devices=st.integers(1, 8),
)
def test_every_row_is_multiplied_once(rows: int, row_bytes: int, devices: int) -> None:
    found = share_rows(rows, rows * row_bytes, devices)
    if not found:
        assert devices == 1 or rows * row_bytes < HEAD_START_BYTES + devices * ROW_UNIT * row_bytes
        return
    assert len(found) == devices
    assert (found[0][0], found[-1][1]) == (0, rows)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(first % ROW_UNIT == 0 for first, _ in found)
    # The last device begins before the others, and ends when they do.
    *others, last = [stop - first for first, stop in found]
    assert len(set(others)) == 1
    ahead = (last - others[0]) * row_bytes
    assert 0 <= ahead - HEAD_START_BYTES <= devices * ROW_UNIT * row_bytes


def test_rows_that_make_no_whole_tiles_stay_together() -> None:
    assert share_rows(VOCABULARY + 8, (VOCABULARY + 8) * 8192, 2) == []
    assert share_rows(VOCABULARY, VOCABULARY * 8192, 1) == []


def test_a_head_that_one_device_reads_as_fast_stays_together() -> None:
    """No device has a share without rows."""
    assert share_rows(4096, HEAD_START_BYTES + 1, 2) == []
    assert share_rows(4096, HEAD_START_BYTES - 1, 2) == []


def test_flash_on_two_devices_and_pro_on_eight() -> None:
    assert share_rows(VOCABULARY, VOCABULARY * 8192, 2) == [(0, 64_128), (64_128, VOCABULARY)]
    pro = share_rows(VOCABULARY, VOCABULARY * 14_336, 8)
    assert [stop - first for first, stop in pro] == [16_000] * 7 + [17_280]


def test_shares_of_a_head() -> None:
    head = pack_weight(planned_quant_tensor(BF16, (VOCABULARY, 4096)))
    shared = share_head(head, GPUS[:3])
    assert isinstance(shared, SharedWeight)
    assert shared.data is head.data
    assert shared.shape == head.shape
    shares = shares_of(shared)
    assert [share.device for share in shares] == list(GPUS[:3])
    assert [share.first for share in shares] == [0, 42_752, 85_504]
    assert sum(share.rows.shape[0] for share in shares) == VOCABULARY


@pytest.mark.parametrize("reason", ["one device", "small", "torch ops", "no peer access"])
def test_a_head_that_is_not_shared(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = GPUS[:1] if reason == "one device" else GPUS[:2]
    stored = planned_quant_tensor(BF16, (256 if reason == "small" else VOCABULARY, 4096))
    head = stored if reason == "torch ops" else pack_weight(stored)
    if reason == "no peer access":
        monkeypatch.setattr(head_shares, "HEAD_START_BYTES", 0)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
        head = pack_weight(QuantTensor.dense(torch.zeros(256, 64, dtype=torch.bfloat16)))
    assert share_head(head, devices) is head
