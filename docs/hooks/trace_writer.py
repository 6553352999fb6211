"""Writes trace files (docs/traces.md). Needs torch and safetensors only, so that it can be copied
beside the engine that is traced.
"""

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from stat import S_IMODE
from tempfile import TemporaryFile

import torch
from safetensors.torch import save_file
from torch import Tensor


class TraceWriter:
    """Collects the values of one sequence over one or several forward passes, on the CPU. A pass
    that begins at position 0 begins a new sequence.

    ``folder`` is the checkpoint's, whose ``config.json`` goes into the file; it is read at once, so
    that a wrong folder shows before the engine has run, as ``OSError`` or as ``ValueError`` where
    it holds no JSON object. ``join`` says how the values of several
    ranks become one: name pattern to "concat:DIM", "sum" or "equal".
    """

    def __init__(
        self,
        engine: str,
        folder: str | Path,
        rank: int = 0,
        ranks: int = 1,
        join: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.folder = Path(folder)
        self.config = _json_object(self.folder / "config.json")
        self.rank = rank
        self.ranks = ranks
        self.join = dict(join or {})
        self.parts: dict[str, list[Tensor]] = {}

    def begin(self, token_ids: Tensor, positions: Tensor) -> None:
        """A forward pass of the next tokens: both integer ``[T]``. One of none, as an idle rank
        makes, adds nothing.
        """
        if len(positions) and positions[0] == 0:
            self.parts.clear()
        self.add("token_ids", token_ids.long())
        self.add("positions", positions.long())

    def add(self, name: str, rows: Tensor) -> None:
        """The next rows of a value; they are copied. Raises ``ValueError`` for what cannot be
        joined with those before.
        """
        copy = rows.detach().to("cpu", copy=True).contiguous()
        parts = self.parts.get(name, [])
        if not copy.dim() or (parts and copy.shape[1:] != parts[0].shape[1:]):
            before = f", as {list(parts[0].shape)} before" if parts else ""
            raise ValueError(f"{name}: found {list(copy.shape)}, expected rows [T, ...]{before}")
        self.parts.setdefault(name, []).append(copy)

    def check(self, path: str | Path) -> None:
        """Raises ``ValueError`` for a folder or a device, which the file would replace, for a file
        in a folder that is not there or cannot be written, and for one in the checkpoint's, in
        which every ``.safetensors`` file may be taken for weights: before the engine has run.
        """
        for file in (Path(path), self.path(path)):
            if file.exists() and not file.is_file():
                raise ValueError(f"{file}: found no regular file, expected a file name")
        parent = Path(path).resolve().parent
        if not parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist")
        if parent == self.folder.resolve():
            raise ValueError(f"{path}: found in the folder of MODEL, expected another one")
        try:
            TemporaryFile(dir=parent).close()
        except OSError as error:
            raise ValueError(f"{path}: its folder cannot be written ({error.strerror})") from None

    def path(self, path: str | Path) -> Path:
        """Of this rank's file: ``theirs.safetensors`` becomes ``theirs.rank2.safetensors``."""
        path = Path(path)
        return path if self.ranks == 1 else path.with_suffix(f".rank{self.rank}{path.suffix}")

    @property
    def whole(self) -> bool:
        """Whether all passes so far are of one sequence: its positions count up from 0. Those that
        an engine makes to warm up are not.
        """
        positions = torch.cat(self.parts["positions"])
        return bool((positions == torch.arange(len(positions))).all())

    def save(self, path: str | Path) -> Path:
        """Writes the file and gives its path. It has the mode of other new files, or of the one in
        whose place it is.
        """
        tensors = {name: torch.cat(parts) for name, parts in self.parts.items()}
        metadata = {
            "format": "dsv4-trace/1",
            "engine": self.engine,
            "versions": json.dumps(_versions("torch", "safetensors", self.engine)),
            "model": self.folder.resolve().name,
            "config": self.config,
            "settings": "{}",
            "join": json.dumps(self.join),
        }
        if self.ranks > 1:
            metadata |= {"rank": str(self.rank), "ranks": str(self.ranks)}
        file = self.path(path)
        # A link would be replaced, not the file that it names.
        target = file.resolve()
        mode = S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        save_file(tensors, target, metadata)
        # safetensors keeps its files from other users.
        target.chmod(mode)
        return file


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _json_object(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: found no JSON ({error}), expected an object") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: found a JSON {type(found).__name__}, expected an object")
    return text


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
