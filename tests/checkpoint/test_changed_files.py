"""Weight files that are replaced, touched or removed while they are read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import Dialect, Weights, describe, load_weights, open_checkpoint
from dsv4.checkpoint.export import export
from dsv4.errors import UserError
from tests.checkpoint.folders import CPU, as_bytes, changed_copy, config_of, matrix, read_tensors

CHANGED = "model.safetensors: changed while it was read, expected a file that stays$"
NAMES = ("layers.0.attn.wq_a.weight", "layers.1.attn.wq_a.weight")


@pytest.fixture
def file(bf16: Path, tmp_path: Path) -> Path:
    return changed_copy(bf16, tmp_path / "x") / "model.safetensors"


def exchange(file: Path) -> None:
    """A file of the same size and the same weights, of which two lie in each other's place."""
    stored = file.read_bytes()
    start = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:start])
    first, second = (header[name]["data_offsets"] for name in NAMES)
    header[NAMES[0]]["data_offsets"] = second
    header[NAMES[1]]["data_offsets"] = first
    text = json.dumps(header, separators=(",", ":")).encode().ljust(start - 8)
    data = bytearray(stored[start:])
    before = bytes(data[slice(*first)])
    data[slice(*first)] = data[slice(*second)]
    data[slice(*second)] = before
    other = file.with_name("other")
    other.write_bytes(stored[:8] + text + data)
    other.replace(file)


def touch(file: Path) -> None:
    os.utime(file, ns=(0, 0))


def loaded(file: Path, change: Callable[[Path], None] = lambda _: None) -> Weights:
    """The weights of a file that changes before the first matrix is read."""
    checkpoint = open_checkpoint(file.parent)
    config = config_of(checkpoint)
    small = sum(one.nbytes for one in describe(checkpoint, config) if one.format is None)

    def progress(done: int, total: int) -> None:
        if done == small:
            change(file)

    return load_weights(checkpoint, config, device_of=lambda _: CPU, progress=progress)


def test_the_exchanged_file_has_the_same_weights(file: Path) -> None:
    before = read_tensors(file.parent)
    exchange(file)
    after = read_tensors(file.parent)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(matrix(loaded(file), NAMES[0]).data, before[NAMES[0]])


@pytest.mark.parametrize("change", [exchange, touch])
def test_a_file_that_changes_during_the_load_is_refused(
    file: Path, change: Callable[[Path], None]
) -> None:
    with pytest.raises(UserError, match=CHANGED):
        loaded(file, change)


def test_a_file_that_changes_during_an_export_leaves_none(file: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done == total:
            touch(file)

    with pytest.raises(UserError, match=CHANGED):
        export(file.parent, tmp_path / "b", "native", Dialect.NATIVE, progress=progress)
    assert not (tmp_path / "b").exists()


def test_a_file_that_is_removed_when_it_was_read_does_no_harm(file: Path) -> None:
    checkpoint = open_checkpoint(file.parent)

    def progress(done: int, total: int) -> None:
        if done == total:
            file.unlink()

    config = config_of(checkpoint)
    weights = load_weights(checkpoint, config, device_of=lambda _: CPU, progress=progress)
    assert NAMES[0] in weights


def test_weights_that_are_loaded_do_not_change_with_their_file(file: Path) -> None:
    weights = loaded(file)
    before = {name: as_bytes(weight) for name, weight in loaded(file).items()}
    with file.open("r+b") as written:
        written.write(bytes(file.stat().st_size))
    assert {name: as_bytes(weight) for name, weight in weights.items()} == before
