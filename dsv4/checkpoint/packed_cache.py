"""Packed weights on disk, so that a second start packs nothing (checkpoints.md#packed-weights)."""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.checkpoint.byte_count import counter
from dsv4.checkpoint.checksum import as_unsigned, checksum, queued_checksum
from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.packed_values import (
    Memory,
    check_numbers,
    described,
    known_classes,
    naming_damage,
    numbers_in,
    remade_weight,
)
from dsv4.checkpoint.pieces import Piece
from dsv4.checkpoint.shard import StoredTensor, read_header
from dsv4.checkpoint.transfer import Transfer
from dsv4.checkpoint.writer import WRITERS, OutputTensor, new_folder, write_json, write_shards
from dsv4.errors import UserError, shorten
from dsv4.json_object import read_json_object
from dsv4.progress import Progress

FORMAT = "dsv4-packed/1"
# Another number for every change of the bytes that a packing makes.
LAYOUTS = 1
MANIFEST = "packed.json"
_WRITTEN_BYTES = 16 << 20
_SHARD_BYTES = 10**9
# Of an entry, as ``new_folder`` calls it until it is complete.
_BEGINNING = re.compile(r"\.([0-9a-f]{32})\.[a-z0-9_]{8}")

# By the name of the first weight that it was made of.
Packed = dict[str, Any]

_LOG = logging.getLogger("dsv4")


class PackedCache:
    """The entry of one checkpoint folder, one packing and one number of ranks in a folder of
    packed weights.

    What hinders it is one warning, and weights are packed: an engine needs no cache. Several
    processes may use a folder at once.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        identity: str,
        packing: str,
        ranks: int,
        progress: Progress | None = None,
    ) -> None:
        """``identity`` as from ``checkpoint_identity``, ``packing`` the name of a ``Packing``;
        ``progress(done_bytes, total_bytes)`` is told as an entry is written. Raises ``UserError``
        when ``folder`` is none that can be written, or that of the checkpoint; it is made if need
        be.
        """
        place = str(checkpoint.folder.resolve())
        files = sorted({stored.file for stored in checkpoint.tensors.values()})
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "dsv4": dsv4.__version__,
            "layouts": LAYOUTS,
            "classes": known_classes(),
            "checkpoint": identity,
            "files": [_stamp(file) for file in files],
        }
        self._folder = folder
        self._name = hashlib.sha256(json.dumps([place, packing, ranks]).encode()).hexdigest()[:32]
        self._ranks = ranks
        self._progress = progress
        self._is_damaged = False
        check_folder(folder)
        if str(folder.resolve()) == place:
            found = "found the folder of the model, expected another one"
            raise UserError(f"EngineConfig.packed_cache: {folder}: {found}")

    @property
    def entry(self) -> Path:
        """The folder of the packed weights: absent, or complete."""
        return self._folder / self._name

    def read(
        self, devices_of: Callable[[str], Sequence[torch.device]], progress: Progress | None
    ) -> list[Packed] | None:
        """What every rank keeps, each on its device of ``devices_of(name)``; None where there is
        nothing that fits, whole. ``progress(done_bytes, total_bytes)`` is told as it is read.
        """
        try:
            with _locked(self._folder, self._name, fcntl.LOCK_SH) as is_locked:
                if not is_locked or not self._fits():
                    return None
                packed = _read(self.entry, self._ranks, devices_of, progress)
        except (OSError, UserError) as error:
            self._is_damaged = True
            _LOG.warning("packed cache: %s; packing again", error)
            return None
        _LOG.info("packed cache: %s: nothing is packed", self.entry)
        return packed

    def write(self, ranks: Sequence[Packed]) -> None:
        """Keeps what was packed for every rank, in the place of an entry that does not fit."""
        try:
            _remove_leftovers(self._folder)
            with _locked(self._folder, self._name, fcntl.LOCK_EX) as is_locked:
                if not is_locked:
                    _LOG.info("packed cache: %s: in use by another process", self.entry)
                    return
                if not self._is_damaged and self._fits():
                    return  # Another process was faster.
                _remove(self.entry)
                _write(self.entry, self._facts, ranks, self._progress)
        except (OSError, TypeError, UserError) as error:
            _LOG.warning("packed cache: %s: not written (%s)", self.entry, error)

    def _fits(self) -> bool:
        """Whether there is an entry for exactly these weights and this code. Raises ``UserError``
        for one that cannot be read.
        """
        if not self.entry.exists():
            return False
        facts = read_json_object(self.entry / MANIFEST).get("facts")
        other = [
            name
            for name, expected in self._facts.items()
            if not isinstance(facts, dict) or facts.get(name) != expected
        ]
        if other:
            _LOG.info("packed cache: %s: other %s; packing again", self.entry, ", ".join(other))
        return not other


def check_folder(folder: Path) -> None:
    """Makes the folder of a cache. Raises ``UserError`` where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except FileExistsError:
        raise UserError(
            f"EngineConfig.packed_cache: {folder}: found a file, expected a folder"
        ) from None
    except OSError as error:
        found = error.strerror
        raise UserError(
            f"EngineConfig.packed_cache: {folder}: cannot be written ({found})"
        ) from None


def _stamp(file: Path) -> list[Any]:
    """What changes with the bytes of a file, wherever they are: ``checkpoint_identity`` reads only
    samples.
    """
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@contextmanager
def _locked(folder: Path, name: str, how: int) -> Iterator[bool]:
    """Whether this process gets the lock of an entry, which nothing outlives the process."""
    with (folder / f"{name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _remove_leftovers(folder: Path) -> None:
    """Removes what processes wrote that were killed: beginnings that nobody has locked."""
    for leftover in folder.iterdir():
        beginning = _BEGINNING.fullmatch(leftover.name)
        if beginning is None:
            continue
        with _locked(folder, beginning[1], fcntl.LOCK_EX) as is_locked:
            if is_locked:
                shutil.rmtree(leftover, ignore_errors=True)


def _remove(entry: Path) -> None:
    """Removes an entry, or whatever stands in its place."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _write(
    entry: Path, facts: Mapping[str, Any], ranks: Sequence[Packed], progress: Progress | None
) -> None:
    memory = Memory()
    values = [
        {name: described(value, memory) for name, value in packed.items()} for packed in ranks
    ]
    tensors = [
        OutputTensor(str(number), torch.uint8, (part.numel(),), partial(part.split, _WRITTEN_BYTES))
        for number, part in enumerate(memory.tensors)
    ]
    body = {"ranks": values, "checksums": [checksum(part) for part in memory.tensors]}
    with new_folder(entry) as temporary:
        write_shards(temporary, tensors, _SHARD_BYTES, progress, WRITERS, entry)
        write_json(
            temporary / MANIFEST, {"facts": dict(facts), "sha256": _digest(body), "packed": body}
        )


def _read(
    entry: Path,
    expected_ranks: int,
    devices_of: Callable[[str], Sequence[torch.device]],
    progress: Progress | None,
) -> list[Packed]:
    """Raises ``UserError`` for an entry that is not as it was written."""
    manifest = read_json_object(entry / MANIFEST)
    body = manifest.get("packed")
    if not isinstance(body, dict) or manifest.get("sha256") != _digest(body):
        raise UserError(f"{entry / MANIFEST}: damaged: its SHA-256 is not what it says")
    ranks = body.get("ranks")
    checksums = body.get("checksums")
    if not isinstance(ranks, list) or not isinstance(checksums, list):
        raise UserError(f"{entry / MANIFEST}: damaged: expected lists of ranks and checksums")
    if len(ranks) != expected_ranks:
        raise UserError(f"{entry / MANIFEST}: damaged: expected {expected_ranks} ranks")
    tensors = {
        name: stored
        for file in sorted(entry.glob("*.safetensors"))
        for name, stored in read_header(file).items()
    }
    with naming_damage(entry / MANIFEST):
        devices = {
            number: devices_of(name)[rank]
            for rank, packed in enumerate(ranks)
            for name, value in packed.items()
            for number in numbers_in(value)
        }
    check_numbers(len(checksums), tensors, map(str, devices), entry=entry)
    memory = [
        torch.empty(tensors[str(number)].nbytes, dtype=torch.uint8, device=devices[number])
        for number in range(len(checksums))
    ]
    _fill(memory, tensors, checksums, progress)
    with naming_damage(entry / MANIFEST):
        return [
            {name: remade_weight(value, memory) for name, value in packed.items()}
            for packed in ranks
        ]


def _fill(
    memory: Sequence[Tensor],
    tensors: Mapping[str, StoredTensor],
    checksums: Sequence[int],
    progress: Progress | None,
) -> None:
    found: dict[str, Tensor] = {}

    def queue_checksum(name: str) -> None:
        found[name] = queued_checksum(memory[int(name)])

    pieces = [
        Piece.whole(stored.file, stored.offset, memory[int(name)], name)
        for name, stored in tensors.items()
    ]
    count = counter(progress, sum(part.numel() for part in memory))
    with Transfer(pieces, count, queue_checksum):
        pass
    for name, total in found.items():
        value = as_unsigned(int(total))
        expected = checksums[int(name)]
        if value != expected:
            raise UserError(
                f"{tensors[name].file}: tensor {name}: damaged: "
                f"found checksum {value}, expected {shorten(expected)}"
            )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
