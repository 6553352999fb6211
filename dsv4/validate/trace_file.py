"""Reads a trace file (docs/traces.md) by slices of tokens, so that memory stays bounded."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.checkpoint.shard import TORCH_DTYPES
from dsv4.errors import UserError, shorten
from dsv4.json_object import parse_json_object
from dsv4.trace.file import FORMAT

TOKENS = "token_ids"
POSITIONS = "positions"


class TraceFile:
    """One open trace file. Tensors are read when asked for.

    Raises ``UserError`` for a file that cannot be read, has another format or names that cannot be
    printed, or lacks token ids or positions, of which there is at least one.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        # Whoever opens a FIFO waits for its writer, and no signal ends it inside safetensors.
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: found no regular file, expected a trace")
        try:
            self._file = stack.enter_context(safe_open(str(path), framework="pt"))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error})") from None
        self.metadata: dict[str, str] = self._file.metadata() or {}
        found = self.metadata.get("format")
        if found != FORMAT:
            where = "in the metadata (docs/traces.md)"
            raise UserError(f"{path}: format: found {found!r}, expected {FORMAT!r} {where}")
        self._all = frozenset(self._file.keys())
        for name in self._all:
            if not name.isprintable():
                raise UserError(f"{path}: found a value {shorten(name)}, expected a printable name")
        self.names = self._all - {TOKENS, POSITIONS}
        self.token_ids = self._integers(TOKENS)
        self.positions = self._integers(POSITIONS)
        if not self.token_ids:
            raise UserError(f"{path}: token_ids: found none, expected at least one token")
        for place, position in enumerate(self.positions):
            if position != place:
                raise UserError(f"{path}: positions[{place}]: found {position}, expected {place}")
        if len(self.positions) != len(self.token_ids):
            expected = f"{len(self.token_ids)}, one for every token"
            raise UserError(f"{path}: positions: found {len(self.positions)}, expected {expected}")

    def _integers(self, name: str) -> list[int]:
        if name not in self._all:
            raise UserError(f"{self.path}: {name}: not in the file")
        # torch cannot read every dtype that safetensors names.
        dtype = self.dtype(name)
        shape = self._file.get_slice(name).get_shape()
        if dtype != "I64" or len(shape) != 1:
            raise UserError(f"{self.path}: {name}: found {dtype} {shape}, expected I64 [T]")
        return self._file.get_tensor(name).tolist()

    def shape(self, name: str) -> list[int]:
        """Of a value that is in the file. Raises ``UserError`` for one without rows or of another
        dtype than ours: complex numbers would be compared by their real parts.
        """
        dtype = self.dtype(name)
        if dtype not in TORCH_DTYPES:
            expected = f"one of {', '.join(TORCH_DTYPES)}"
            raise UserError(f"{self.path}: {name}: found {dtype}, expected {expected}")
        shape = self._file.get_slice(name).get_shape()
        if not shape:
            raise UserError(f"{self.path}: {name}: found a scalar, expected rows [T, ...]")
        return shape

    def dtype(self, name: str) -> str:
        """Of a value that is in the file, as safetensors names it."""
        return self._file.get_slice(name).get_dtype()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of a value ``[rows, ...]``, in the dtype of the file."""
        return self._file.get_slice(name)[start:stop]

    def object(self, key: str) -> dict[str, Any]:
        """The JSON object of a metadata key; empty if it is absent."""
        return parse_json_object(self.metadata.get(key, "{}"), f"{self.path}: {key}")


def slices(rows: int, width: int, most: int = 1 << 21) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of ``rows`` rows with at most ``most`` values of ``width`` each."""
    step = max(1, most // max(1, width))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
