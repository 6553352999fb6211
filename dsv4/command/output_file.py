"""The files that commands write: whole or not at all, and nothing else is replaced by them."""

import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from dsv4.errors import UserError
from dsv4.model_files import files_of_model, is_new_shard
from dsv4.replaced_file import takes_over

STDOUT = Path("-")
# Much more than a folder entry, and less than any report with its prompt.
_PROBE_BYTES = 1 << 16


def check_output(flag: str, path: Path) -> None:
    """Raises the ``UserError`` that ``write_output`` would raise, as far as it shows beforehand:
    a folder, a block device, a read-only file or folder, a full disk. Leaves nothing behind.
    """
    if path == STDOUT:
        return
    with _named(flag, path):
        status = _status(path)
        if status is None or (stat.S_ISREG(status.st_mode) and os.access(_folder(path), os.W_OK)):
            _probe(path)


def check_regular_output(flag: str, path: Path) -> None:
    """``check_output`` for a file that can be nothing but a regular one."""
    with _named(flag, path):
        if path == STDOUT or (path.exists() and not path.is_file()):
            raise _Unfit("found no regular file, expected the name of a file")
    check_output(flag, path)


def check_replaced_output(flag: str, path: Path) -> None:
    """``check_regular_output`` for a file that is always made anew, in the place of an older one:
    its folder has to take it, and what was said on a standard stream would be lost with it.
    """
    check_regular_output(flag, path)
    with _named(flag, path):
        if _standard_stream(_status(path)) is not None:
            raise _Unfit("found the file that stdout or stderr is, expected another one")
        if not os.access(_folder(path), os.W_OK):
            _probe(path)


def refuse_shared_files(
    read: Sequence[tuple[str, Path | None]],
    written: Sequence[tuple[str, Path | None]],
    model: Path | None = None,
    also: tuple[str, Path] | None = None,
) -> None:
    """Raises ``UserError`` for a regular file that one flag writes and another one reads or writes.
    Both are flags with their files, None where one is not given; ``model``: the folder of
    ``--model``, ``also``: what names another folder of weights, such as a draft module's flag, and
    that folder. These get no new shards.
    """
    folders = [("--model", model)] if model is not None else []
    folders += [also] if also is not None else []
    of_folders = [(of, path) for of, folder in folders for path in files_of_model(folder)]
    flags: dict[tuple[int, int] | str, str] = {}
    for is_written, given in ((False, [*of_folders, *read]), (True, written)):
        for flag, path in given:
            file = None if path is None or path == STDOUT else _identity(path)
            if file is None:
                continue
            if is_written and file in flags:
                expected = "expected another one"
                raise UserError(f"{flag}: {path}: found the file of {flags[file]}, {expected}")
            for of, folder in folders if is_written else []:
                if path is not None and is_new_shard(folder, path):
                    expected = "expected another folder or another ending"
                    raise UserError(f"{flag}: {path}: found a new shard of {of}, {expected}")
            flags[file] = flag


def write_output(flag: str, path: Path, text: str) -> None:
    """Writes ``text`` in UTF-8 to ``path``; ``-`` is stdout. Lone surrogates are written as JSON
    escapes them.

    A regular file, at the end of links, is replaced in one step and keeps its mode and owner.
    Everything else (a FIFO, a device, what stdout or stderr is, a file with several names, a file
    in a folder that cannot be written) is written to as it is. Raises ``UserError`` that names
    ``flag``.
    """
    data = text.encode("utf-8", "backslashreplace")
    with _named(flag, path):
        status = None if path == STDOUT else _status(path)
        stream = sys.stdout if path == STDOUT else _standard_stream(status)
        if stream is not None:
            stream.flush()
            stream.buffer.write(data)
            stream.buffer.flush()
        elif status is None or _is_replaceable(path, status):
            _replace(Path(os.path.realpath(path)), status, data)
        else:
            path.write_bytes(data)


def _probe(path: Path) -> None:
    probe = _folder(path) / _temporary_name()
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _named(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag}: {path}: cannot be written ({error.strerror})") from None
    except _Unfit as error:
        raise UserError(f"{flag}: {path}: {error}") from None


class _Unfit(Exception):
    """What ``path`` is instead of a file that can be written."""


def _status(path: Path) -> os.stat_result | None:
    """What ``path`` leads to, None if it is yet to be made. Raises ``_Unfit`` and ``OSError``."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if not _folder(path).is_dir():
            raise _Unfit("its folder does not exist") from None
        return None
    if stat.S_ISDIR(status.st_mode):
        raise _Unfit("found a folder, expected a file name")
    if stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode):
        raise _Unfit("found a block device or a socket, expected a file")
    # The superuser may write to a file that its owner has protected, but was not asked to.
    protected = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o222
    if protected or not os.access(path, os.W_OK):
        raise _Unfit("found a read-only file, expected one that can be written")
    return status


def _identity(path: Path) -> tuple[int, int] | str | None:
    """The same for all names of a regular file, also of one that is yet to be made; None for
    anything else, which may be read and written at once.
    """
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _folder(path: Path) -> Path:
    return Path(os.path.realpath(path)).parent


def _temporary_name() -> str:
    return f".dsv4-{secrets.token_hex(8)}"


def _standard_stream(status: os.stat_result | None) -> TextIO | None:
    """The standard stream that is the same file: opened anew it would be written from its start."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # In-memory streams have no descriptor.
            if status is not None and os.path.samestat(os.fstat(stream.fileno()), status):
                return stream
    return None


def _is_replaceable(path: Path, status: os.stat_result) -> bool:
    """Whether a rename leaves everything about the file as it is but its content."""
    named = _status(Path(os.path.realpath(path)))
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and named is not None  # A deleted file behind /proc/self/fd has no name.
        and os.path.samestat(named, status)
        and os.access(_folder(path), os.W_OK)
    )


def _replace(path: Path, status: os.stat_result | None, data: bytes) -> None:
    temporary = path.with_name(_temporary_name())
    try:
        with temporary.open("xb") as file:
            like_before = status is None or takes_over(temporary, status)
            file.write(data if like_before else b"")
        if like_before:
            temporary.replace(path)
        else:
            path.write_bytes(data)
    finally:
        temporary.unlink(missing_ok=True)
