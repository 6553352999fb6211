"""Opens a checkpoint folder: ``config.json``, the shards and the place of every tensor. No tensor
byte is read.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dsv4.checkpoint.problems import Problems, printable
from dsv4.checkpoint.shard import StoredTensor, map_tensor, read_header
from dsv4.checkpoint.uncollected import uncollected
from dsv4.config import ModelConfig
from dsv4.errors import UserError, shorten
from dsv4.json_object import read_json_object
from dsv4.model_files import model_file, resolve_inside

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,200}\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder. ``tensors`` maps the names in the files to where they lie; ``unreadable``
    are the names that the index puts into a damaged or missing shard.

    ``problems`` holds damaged shards and disagreements between index and shards, so that they are
    reported together with what the comparison with the config finds; ``load_weights`` and
    ``describe`` raise for them. ``stamps``: size and time of every weight file before its header
    was read, None where there is no such file.
    """

    folder: Path
    raw_config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    tensors: dict[str, StoredTensor]
    unreadable: frozenset[str]
    problems: Problems
    stamps: dict[Path, tuple[int, int] | None]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, those in damaged shards included."""
        return (*self.tensors, *self.unreadable)

    def model_config(self) -> ModelConfig:
        """What ``config.json`` says of the model. Raises ``UserError`` that names the file."""
        return ModelConfig.from_dict(self.raw_config, str(self.folder / "config.json"))

    def read(self, name: str) -> Tensor:
        """One tensor as stored, memory-mapped: it costs no memory beyond the pages that are touched
        while it lives.
        """
        if name not in self.tensors:
            raise UserError(f"{self.folder}: {printable(name)}: no such tensor")
        return map_tensor(self.tensors[name])

    def check_unchanged(self) -> None:
        """To be called behind reads: raises ``UserError`` for a file that is another one than that
        whose header was read, because its tensors may lie elsewhere.
        """
        for file, stamp in self.stamps.items():
            found = _stamp(file)
            if found is not None and found != stamp:
                raise UserError(f"{file}: changed while it was read, expected a file that stays")


@uncollected()
def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face folder: an index with shards, or one single ``.safetensors`` file.

    Raises ``UserError`` when there is no folder, no readable ``config.json``, no weights, or an
    index that is not one or names anything but files of the folder. Faults inside the shards go to
    ``Checkpoint.problems``.
    """
    try:
        folder = Path(path)
    except TypeError:
        expected = "expected the path of a folder"
        raise UserError(f"checkpoint: found {shorten(path)}, {expected}") from None
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    raw_config = read_json_object(model_file(folder, "config.json"))
    declared = model_file(folder, "hf_quant_config.json")
    hf_quant_config = read_json_object(declared) if declared.exists() else None
    problems = Problems()
    index = model_file(folder, INDEX_NAME)
    if index.exists():
        weight_map = _weight_map(index)
        files = {
            name: resolve_inside(folder, name, INDEX_NAME)
            for name in dict.fromkeys(weight_map.values())
        }
        stamps = {path: _stamp(path) for path in files.values()}
        shards = _read_headers(files, problems)
        tensors = _merge(weight_map, shards, problems)
        unreadable = frozenset(name for name, file in weight_map.items() if shards[file] is None)
    else:
        single = _single_file(folder)
        stamps = {single: _stamp(single)}
        tensors = read_header(single)
        unreadable = frozenset()
    return Checkpoint(folder, raw_config, hf_quant_config, tensors, unreadable, problems, stamps)


def _stamp(file: Path) -> tuple[int, int] | None:
    """What changes when a file is written to, or another one takes its place."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{path}: weight_map: found {shorten(weight_map)}, expected tensor name → file name"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise UserError(
                f"{path}: weight_map: {printable(name)}: found {shorten(file)}, "
                "expected the name of a .safetensors file in this folder"
            )
    return weight_map


def _single_file(folder: Path) -> Path:
    try:
        files = sorted(file.name for file in folder.iterdir() if file.suffix == ".safetensors")
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None
    if len(files) != 1:
        raise UserError(
            f"{folder}: found {len(files)} .safetensors files and no {INDEX_NAME}, "
            f"expected {INDEX_NAME} or one single {SINGLE_NAME}"
        )
    return resolve_inside(folder, files[0], "the folder listing")


def _read_headers(
    files: dict[str, Path], problems: Problems
) -> dict[str, dict[str, StoredTensor] | None]:
    """Tensors of every shard; None for a damaged one, whose tensors then do not count as missing as
    well.
    """
    shards: dict[str, dict[str, StoredTensor] | None] = {}
    for name, path in files.items():
        try:
            shards[name] = read_header(path)
        except UserError as error:
            problems.add("unreadable shards", str(error))
            shards[name] = None
    return shards


def _merge(
    weight_map: dict[str, str],
    shards: dict[str, dict[str, StoredTensor] | None],
    problems: Problems,
) -> dict[str, StoredTensor]:
    tensors = {}
    for name, file in weight_map.items():
        shard = shards[file]
        if shard is not None and name in shard:
            tensors[name] = shard[name]
        elif shard is not None:
            problems.add(
                "named by the index but absent from their shard", f"{printable(name)} ({file})"
            )
    for file, shard in shards.items():
        for name in shard or ():
            if name not in weight_map:
                problems.add("in a shard but not in the index", f"{printable(name)} ({file})")
            elif weight_map[name] != file:
                where = f"{file}, in the index {weight_map[name]}"
                problems.add("in another shard than the index says", f"{printable(name)} ({where})")
    return tensors
