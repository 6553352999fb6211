"""Rows of a sequence in a ring, as they are copied."""

import pytest
import torch

from dsv4.caches import filled
from dsv4.caches.filled import FilledRows


@pytest.mark.parametrize(("nbytes", "lengths"), [(50, [3, 1, 3, 2]), (1, [1] * 9)])
def test_rows_come_in_their_order_in_views_of_bounded_size(
    nbytes: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one where each is larger."""
    monkeypatch.setattr(filled, "_PART_BYTES", nbytes)
    store = torch.arange(40, dtype=torch.float32).view(10, 4)
    parts = list(FilledRows("rows", store, 26, 9, in_ring=True).parts())
    assert [len(part) for part in parts] == lengths
    assert torch.equal(torch.cat(parts), store[[6, 7, 8, 9, 0, 1, 2, 3, 4]])
    assert parts[0].data_ptr() == store[6].data_ptr()
