"""The file of ``--out``: a line for every answer, which a later run goes on with."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dsv4.checkpoint.writer import naming_file
from dsv4.cli.prompts.prompts_file import PromptLine, parse_line
from dsv4.command.output_file import check_regular_output
from dsv4.errors import UserError, shorten


class AnswerFile:
    """Answers to lines, in a file that this process has locked.

    ``failed`` says of every id that the file has whether there is an error in place of an answer.
    """

    def __init__(
        self, file: BinaryIO, name: str, source: str, lines: Sequence[PromptLine], context: int
    ) -> None:
        """Reads what is there, and removes the beginning of a line that was not finished. Raises
        ``UserError`` for what does not belong to ``lines``, those of the file ``source`` that are
        answered in ``context`` tokens.
        """
        self.failed: dict[int | str, bool] = {}
        self._file = file
        self._name = name
        self._source = source
        self._context = context
        self._lines = {line.id: line for line in lines}
        self._resume()

    def append(self, line: PromptLine, answer: dict[str, Any]) -> None:
        """Writes the answer to ``line``; it is on the disk afterwards. Raises ``UserError``."""
        record = {"id": line.id, "request": line.request, **answer}
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        data = text.encode("utf-8", "backslashreplace")
        with naming_file(f"--out: {self._name}"):
            while data:
                data = data[os.write(self._file.fileno(), data) :]
            os.fsync(self._file.fileno())
        self.failed[line.id] = "error" in answer

    def _resume(self) -> None:
        self._file.seek(0)
        end = 0
        for number, text in enumerate(self._file, 1):
            where = f"--out: {self._name}: line {number}: "
            if not text.endswith(b"\n"):
                self._check_torn(text, where)
                self._file.truncate(end)
                return
            self._take(text, where)
            end += len(text)

    def _take(self, text: bytes, where: str) -> None:
        try:
            found = parse_line(text)
        except UserError as error:
            raise UserError(f"{where}{error}") from None
        if "id" not in found or "request" not in found:
            raise UserError(f"{where}found no id and request, expected an answer to --prompts")
        id_ = found["id"]
        line = self._lines.get(id_) if type(id_) in (int, str) else None
        if line is None:
            raise UserError(f"{where}id: found {shorten(id_)}, which {self._source} does not have")
        if id_ in self.failed:
            raise UserError(f"{where}id: found {shorten(id_)} a second time, expected one answer")
        if found["request"] != line.request:
            raise UserError(
                f"{where}request: found id {shorten(id_)} answered for another request than "
                f"line {line.number} of {self._source} and the flags make, expected the same one"
            )
        # The last token of an answer needs no room in the caches.
        most = self._context + 1
        tokens = _tokens(found)
        if tokens > most or (found.get("finish_reason") == "context" and tokens < most):
            raise UserError(
                f"{where}tokens: found id {shorten(id_)} answered in another context than "
                f"--max-context makes, of {self._context} tokens, expected the same one"
            )
        self.failed[id_] = "error" in found

    def _check_torn(self, text: bytes, where: str) -> None:
        """Raises ``UserError`` unless ``append`` may have begun to write this."""
        for id_ in self._lines.keys() - self.failed.keys():
            head = json.dumps({"id": id_, "request": ""}, ensure_ascii=False).removesuffix('"}')
            begun = head.encode("utf-8", "backslashreplace")
            if begun.startswith(text) or text.startswith(begun):
                return
        raise UserError(f"{where}found no line break and no beginning of an answer to --prompts")


def _tokens(found: dict[str, Any]) -> int:
    """Of the prompt and its answer; 0 for an error in its place."""
    tokens = found.get("tokens")
    counts = tokens.values() if isinstance(tokens, dict) else ()
    return sum(count for count in counts if isinstance(count, int))


@contextmanager
def open_answers(
    path: Path, source: str, lines: Sequence[PromptLine], context: int
) -> Iterator[AnswerFile]:
    """The file ``path``, made if it is not there; no other process can open it inside the block.
    Raises ``UserError``.
    """
    check_regular_output("--out", path)
    with naming_file(f"--out: {path}"):
        file = path.open("a+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out: {path}: another process is writing answers to it") from None
        except OSError as error:
            raise UserError(f"--out: {path}: cannot be locked ({error.strerror})") from None
        yield AnswerFile(file, str(path), source, lines, context)
