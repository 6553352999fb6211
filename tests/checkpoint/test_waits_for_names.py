"""Who waits for a part of what is read goes on while the rest is."""

import threading
import time
from pathlib import Path

import pytest

from dsv4.checkpoint import transfer
from dsv4.checkpoint.pieces import Piece
from tests.checkpoint.shuffled import memory


def test_who_waits_for_a_name_goes_on_before_all_others_are_filled(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", 100)
    has_gone_on = threading.Event()
    found: list[bool] = []

    def filled(name: str) -> None:
        if name == "a":
            time.sleep(0.05)  # Until somebody waits for it.
        else:
            found.append(has_gone_on.wait(2))

    pieces = [Piece.whole(files[0], at, memory(100), name) for at, name in ((0, "a"), (900, "b"))]
    with transfer.Transfer(pieces, lambda _: None, filled, readers=1) as moving:
        moving.wait("a")
        has_gone_on.set()
    assert found == [True]
