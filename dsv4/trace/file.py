"""Trace files: written value by value as steps end, in memory that does not grow (traces.md)."""

import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from dsv4.checkpoint.writer import StoredType, lay_out_file, naming_file, regular_file
from dsv4.errors import UserError
from dsv4.replaced_file import put_in_place

FORMAT = "dsv4-trace/1"
# What of a value lies on the disk twice while the file is put together.
_COPIED_BYTES = 1 << 20

# What ends a trace at the steps that there are.
_CUTS = (KeyboardInterrupt, BrokenPipeError, FloatingPointError)


@dataclass
class _Value:
    """A value so far: its rows lie in ``part``, of which ``written`` are known to be whole."""

    part: Path
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    written: int = 0


class TraceFile:
    """Writes the trace ``path``, which appears when the block ends, with the steps that ended.

    A hidden folder beside it holds the rows until then. An interruption ends the block as usual,
    also one that comes as it ends, and so do a reader of the text who has gone and NaN, whose place
    the trace shows; after another exception nothing is left behind.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, str], tokens: int, prompt_tokens: int
    ) -> None:
        """``metadata``: strings for the header. ``tokens``: the most that will be traced, of which
        the first ``prompt_tokens`` are prefilled; the header counts those in the file.

        Raises ``UserError`` when ``path`` cannot be a file.
        """
        self._path = regular_file(path)
        self._metadata = {"format": FORMAT, **metadata}
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._values: dict[str, _Value] = {}
        # Rows that belong to steps that ended.
        self._ended: dict[str, int] = {}
        self._has_room = False
        self._writer = ThreadPoolExecutor(1, "dsv4-trace")
        # Nobody waits for a thread that was interrupted while it started, so it starts now.
        self._writer.submit(int).result()
        self._ending: Future[None] | None = None
        with naming_file(path):
            self._parts = Path(tempfile.mkdtemp(prefix=".dsv4-", dir=self._path.parent))
        # At the latest with the program: an interruption may come before the block's end begins.
        self._remove = finalize(self, shutil.rmtree, self._parts, ignore_errors=True)

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end(kind)
        except KeyboardInterrupt:
            # It may have come before the writer knew of the end.
            self._end(kind)
            raise

    def add(self, name: str, rows: Tensor) -> None:
        """Appends rows of a value; ``token_ids``, the last one of a step, ends the step.

        Raises ``UserError`` when the disk cannot hold the trace, judged by the first step, or
        cannot be written.
        """
        value = self._values.get(name)
        if value is None:
            part = self._parts / str(len(self._values))
            value = _Value(part, rows.dtype, tuple(rows.shape[1:]))
            self._values[name] = value
        assert (rows.dtype, tuple(rows.shape[1:])) == (value.dtype, value.row_shape), name
        if rows.numel():
            with naming_file(self._path), value.part.open("ab") as file:
                file.write(rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        value.written += rows.shape[0]
        if name == "token_ids":
            self._end_step()

    def _end(self, kind: type[BaseException] | None) -> None:
        """Only the main thread is interrupted: it waits here until the file is whole and the folder
        gone. Twice does no more than once.
        """
        is_kept = kind is None or issubclass(kind, _CUTS)
        if self._ending is None:
            self._ending = self._writer.submit(self._finish, is_kept)
        self._ending.result()
        self._writer.shutdown()

    def _end_step(self) -> None:
        # At once: an interruption between two values would leave them with other numbers of rows.
        self._ended = {name: value.written for name, value in self._values.items()}
        if not self._has_room:
            self._check_room()
            self._has_room = True

    def _check_room(self) -> None:
        nbytes = sum(stored.nbytes for stored in self._stored().values())
        tokens = self._ended["token_ids"]
        needed = nbytes * (self._tokens - tokens) // tokens
        free = shutil.disk_usage(self._parts).free
        if needed > free:
            raise UserError(
                f"{self._path}: found {free / 1e9:.1f} GB free, expected {needed / 1e9:.1f} GB "
                f"for {self._tokens} tokens; patterns choose fewer values"
            )

    def _stored(self) -> dict[str, StoredType]:
        """What of each value belongs to steps that ended."""
        return {
            name: StoredType(value.dtype, (self._ended[name], *value.row_shape))
            for name, value in self._values.items()
            if name in self._ended
        }

    def _finish(self, is_kept: bool) -> None:
        """The file, if there is to be one, and then no folder any more. An interruption may have
        had this asked for twice.
        """
        if not self._remove.alive:
            return
        try:
            if is_kept and self._has_room:
                self._put_together()
        finally:
            self._remove()

    def _put_together(self) -> None:
        """The header, then the rows of each value, whose part goes as it is copied."""
        stored = self._stored()
        prefilled = min(self._prompt_tokens, self._ended["token_ids"])
        metadata = {**self._metadata, "prompt_tokens": str(prefilled)}
        header, offsets = lay_out_file(stored, metadata)
        whole = self._parts / "trace"
        with naming_file(self._path):
            with whole.open("wb") as file:
                file.write(header)
                for name, value in stored.items():
                    _copy(self._values[name].part, value.nbytes, file, offsets[name])
            put_in_place(whole, self._path)


def _copy(path: Path, nbytes: int, file: Any, offset: int) -> None:
    """The first ``nbytes`` of the part ``path``, from the last one on, so that the part shrinks as
    the file grows: a disk that has taken all steps takes the file.
    """
    if not nbytes:
        return
    with path.open("r+b") as part:
        # Of a step that did not end there is more.
        part.truncate(nbytes)
        while nbytes:
            start = max(0, nbytes - _COPIED_BYTES)
            part.seek(start)
            file.seek(offset + start)
            file.write(part.read(nbytes - start))
            file.flush()
            part.truncate(start)
            nbytes = start
    path.unlink()
