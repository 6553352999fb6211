"""An export to a disk that is full: the destination is named, and nothing is left there."""

import errno
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.checkpoint import Dialect
from dsv4.checkpoint.export import export
from dsv4.checkpoint.shard import read_header
from dsv4.errors import UserError
from tests.checkpoint.folders import changed_copy


@pytest.fixture
def fails(bf16: Path, tmp_path: Path) -> Callable[[], str]:
    """Exports a folder with a tokenizer to ``out/x`` and gives the error."""
    source = changed_copy(bf16, tmp_path / "source")
    (source / "tokenizer.json").write_bytes(b"x" * 1000)
    (tmp_path / "out").mkdir()

    def run() -> str:
        with pytest.raises(UserError) as caught:
            export(source, tmp_path / "out/x", "bf16", Dialect.NATIVE)
        assert list((tmp_path / "out").iterdir()) == []
        return str(caught.value)

    return run


def test_room_for_all_files_is_checked_before_any_is_written(
    fails: Callable[[], str], bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sum(stored.nbytes for stored in read_header(bf16 / "model.safetensors").values())
    needed = f"{(tensors + 1000) / 1e9:.3g} GB"
    for free, found in ((1000, "1e-06 GB"), (tensors, f"{tensors / 1e9:.3g} GB")):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
            patch.setattr("dsv4.checkpoint.export.write_json", pytest.fail)
            error = fails()
        assert error.startswith(f"{tmp_path}/out: found {found} free, expected at least {needed}")


@pytest.mark.parametrize(
    ("write", "place"), [("write_text", "x/config.json"), ("write_bytes", "x/tokenizer.json")]
)
def test_a_small_file_that_does_not_fit_is_named_by_its_destination(
    fails: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: str,
    place: str,
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, write, full)
        error = fails()
    assert error == f"{tmp_path}/out/{place}: cannot be written (No space left on device)"


@pytest.mark.parametrize(
    ("shard_bytes", "name"),
    [
        (10**9, "model.safetensors"),
        (10**5, r"model-\d{5}-of-\d{5}\.safetensors"),
    ],
)
def test_a_shard_that_does_not_fit_is_named_by_its_destination(
    bf16: Path, tmp_path: Path, shard_bytes: int, name: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(
            UserError, match=rf"^{tmp_path}/x/{name}: cannot be written \(File too large\)$"
        ):
            export(bf16, tmp_path / "x", "bf16", Dialect.NATIVE, shard_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
