"""Writes safetensors files: sharded, streamed, with the data ordered so that every tensor is
aligned.
"""

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from dsv4.checkpoint.byte_count import counter
from dsv4.checkpoint.index import INDEX_NAME, SINGLE_NAME
from dsv4.checkpoint.shard import DTYPE_NAMES
from dsv4.errors import UserError
from dsv4.progress import Progress
from dsv4.replaced_file import put_in_place

DEFAULT_SHARD_BYTES = 5 * 10**9
# Threads that write what is in memory.
WRITERS = 8
_PIECE_BYTES = 8 << 20
# Of a file that ``new_file`` makes, until it is complete.
_BEGINNING = re.compile(r"\.dsv4-new-[0-9a-f]{16}")


class StoredType(NamedTuple):
    """The dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class OutputTensor(NamedTuple):
    """A tensor to be written; ``produce`` gives its rows, in one or several tensors whose bytes
    follow each other.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    produce: Callable[[], Iterable[Tensor]]

    @property
    def stored(self) -> StoredType:
        return StoredType(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder beside ``destination`` that becomes ``destination`` at the end, or
    disappears on any error.

    Raises ``UserError`` that names ``destination`` when it exists or cannot be made, and when its
    parent is not a folder.
    """
    if destination.exists() or destination.is_symlink():
        raise UserError(f"{destination}: already exists, expected the name of a new folder")
    if not destination.parent.is_dir():
        raise UserError(f"{destination.parent}: no such folder")
    with naming_file(destination):
        name = tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o755)
        with naming_file(destination):
            temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def naming_file(name: Path | str) -> Iterator[None]:
    """Raises what the disk reports inside the block as ``UserError`` that begins with ``name``, a
    path or a flag with its path.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: cannot be written ({error.strerror})") from None


def regular_file(destination: Path) -> Path:
    """The file that ``destination`` leads to, also one that is yet to be made. Raises ``UserError``
    when it is no regular one or has no folder.
    """
    path = Path(os.path.realpath(destination))
    # Not ``exists``, for which a loop of links is none.
    with naming_file(destination), suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{destination}: found no regular file, expected the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder")
    return path


@contextmanager
def new_file(destination: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A file that becomes ``destination`` at the end (``put_in_place``), or disappears on any
    error.

    Raises ``UserError`` that names ``destination`` when it is no regular file, cannot be written,
    or ``nbytes`` do not fit beside it.
    """
    path = regular_file(destination)
    _expect_free(path.parent, nbytes, destination)
    temporary = path.with_name(f".dsv4-new-{secrets.token_hex(8)}")
    try:
        with naming_file(destination), temporary.open("xb") as lock:
            # It ends with the process, which tells ``remove_leftovers``. Some disks have none.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with temporary.open("wb") as file:
                yield file
            put_in_place(temporary, path)
    finally:
        # A disk that nobody may write to any more, which the error names, has this one too.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what ``new_file`` had begun in ``folder`` when its process was killed: beginnings
    that nobody has locked, as far as that can be told.
    """
    for leftover in folder.glob(".dsv4-new-*"):
        if _BEGINNING.fullmatch(leftover.name) is None or not leftover.is_file():
            continue
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented UTF-8 JSON with a final newline; lone surrogates as JSON escapes them."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_shards(
    folder: Path,
    tensors: list[OutputTensor],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    writers: int = 1,
    destination: Path | None = None,
) -> None:
    """Writes all tensors in order: one ``model.safetensors``, or shards of up to ``shard_bytes``
    and their index, as many at once as ``writers``. ``progress(done_bytes, total_bytes)`` is told
    of every piece, by one thread at a time. ``destination``: what ``folder`` is to become, which
    errors name.

    Raises ``UserError`` before anything is written where there is not enough room. The first error
    of any thread, or Ctrl-C, ends all of them within one piece.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    check_room(folder, total)
    wrote = counter(progress, total)
    stop = Event()
    named = destination or folder
    shards = _split(tensors, shard_bytes)
    weight_map = {}
    files: list[tuple[Path, Path, list[OutputTensor]]] = []
    for number, shard in enumerate(shards, 1):
        name = (
            SINGLE_NAME
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        files.append((folder / name, named / name, shard))
        weight_map.update({tensor.name: name for tensor in shard})
    with ThreadPoolExecutor(writers, "dsv4-write") as threads:
        try:
            running = [threads.submit(_write_file, *file, wrote, stop) for file in files]
            for finished in as_completed(running):
                finished.result()
        finally:
            stop.set()
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with naming_file(named / INDEX_NAME):
            write_json(folder / INDEX_NAME, index)


def check_room(folder: Path, nbytes: int) -> None:
    """Raises ``UserError`` when the file system of ``folder``, a temporary one, has less than
    ``nbytes`` free; it names the folder around.
    """
    _expect_free(folder, nbytes, folder.parent)


def _expect_free(folder: Path, nbytes: int, name: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        found = f"found {_gigabytes(free)} free, expected at least {_gigabytes(nbytes)}"
        raise UserError(f"{name}: {found}")


def _gigabytes(nbytes: int) -> str:
    """A number that tells something of a few bytes too."""
    value = nbytes / 1e9
    return f"{value:.3g} GB" if value < 100 else f"{value:,.1f} GB"


def _split(tensors: list[OutputTensor], shard_bytes: int) -> list[list[OutputTensor]]:
    shards: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def lay_out_file(
    tensors: Mapping[str, StoredType], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file with the tensors in this order, and by name where in the
    file the bytes of each begin.
    """
    # Readers view the bytes in place: the widest elements first keep every offset a multiple of its
    # element size.
    offsets = {}
    end = 0
    for name, stored in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets[name] = end
        end += stored.nbytes
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, stored in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [offsets[name], offsets[name] + stored.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + offset for name, offset in offsets.items()}


def _write_file(
    path: Path,
    name: Path,
    tensors: list[OutputTensor],
    wrote: Callable[[int], object],
    stop: Event,
) -> None:
    if stop.is_set():
        return
    stored = {tensor.name: tensor.stored for tensor in tensors}
    header, offsets = lay_out_file(stored, {"format": "pt"})
    with naming_file(name), path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            file.seek(offsets[tensor.name])
            written = 0
            for rows in tensor.produce():
                assert rows.dtype == tensor.dtype
                for piece in rows.contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES):
                    nbytes = file.write(_on_host(piece).numpy().data)
                    written += nbytes
                    wrote(nbytes)
                    if stop.is_set():
                        return
            assert written == tensor.nbytes


def _on_host(memory: Tensor) -> Tensor:
    """uint8 ``[bytes]``, of a GPU by pinned memory, which torch keeps for the next ones: a copy to
    new memory waits for every page of it.
    """
    if not memory.is_cuda:
        return memory
    return torch.empty(len(memory), dtype=torch.uint8, pin_memory=True).copy_(memory)
