"""Writing shards: progress by piece, and no byte where there is not enough room."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.checkpoint.writer import OutputTensor, new_folder, write_shards
from dsv4.errors import UserError


def in_pieces(name: str, count: int) -> OutputTensor:
    """``count`` rows of 100 bytes, produced one by one."""
    row = torch.zeros(1, 100, dtype=torch.uint8)
    return OutputTensor(name, torch.uint8, (count, 100), lambda: [row] * count)


def test_progress_is_told_of_every_piece_across_shards(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    tensors = [in_pieces("a", 3), in_pieces("b", 2)]
    write_shards(tmp_path, tensors, 300, lambda done, total: told.append((done, total)))
    assert told == [(100 * piece, 500) for piece in range(1, 6)]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(("free", "fits"), [(500, True), (499, False)])
def test_room_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free * 10**9))
    huge = OutputTensor("a", torch.uint8, (500 * 10**9,), list)

    def write() -> None:
        with new_folder(tmp_path / "new") as folder:
            write_shards(folder, [huge])

    if fits:
        with pytest.raises(AssertionError):  # The tensor has fewer bytes than it said.
            write()
    else:
        with pytest.raises(UserError) as caught:
            write()
        found = "found 499.0 GB free, expected at least 500.0 GB"
        assert str(caught.value) == f"{tmp_path}: {found}"
    assert list(tmp_path.iterdir()) == []
