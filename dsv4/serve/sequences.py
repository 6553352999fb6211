"""Sequences that the engine has left, in files: it goes on with the one that shares most with a
prompt.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsv4.caches.state import undoable_tokens
from dsv4.checkpoint.state_file import SavedState
from dsv4.checkpoint.writer import remove_leftovers
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.progress import Progress
from dsv4.token_ids import shared_beginning

# What a prompt of fewer tokens takes to be read is less than its file takes.
FEWEST_TOKENS = 256
SUFFIX = ".dsv4-state"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptSequence:
    """A file: the tokens of its sequence, and how many of the last ones can be taken back."""

    path: Path
    token_ids: list[int]
    undoable: int

    def reusable(self, token_ids: Sequence[int]) -> int:
        """As ``Engine.reusable_tokens``, once it is loaded."""
        shared = shared_beginning(self.token_ids, token_ids[:-1])
        return shared if len(self.token_ids) - shared <= self.undoable else 0


class SavedSequences:
    """At most ``most`` files in ``folder``, which go in the order of their last use. Without a
    folder there are none.
    """

    def __init__(self, engine: Engine, folder: Path | None, most: int) -> None:
        """Takes the files of earlier servers that this engine can go on with, and removes what they
        were writing when they were killed.
        """
        self._engine = engine
        self._folder = folder
        self._most = most
        self._kept: list[KeptSequence] = []
        self._forgets = False
        if folder is not None:
            remove_leftovers(folder)
            for path in sorted(folder.glob(f"*{SUFFIX}"), key=_last_used):
                self._take(path)
            self._drop(self._kept[:-most])

    def resume(self, token_ids: Sequence[int], forgets: bool) -> None:
        """Before the prompt ``token_ids``: the engine stands in the sequence that shares most with
        it, and keeps the one that it leaves. ``forgets``: no later prompt begins with this one and
        its answer.
        """
        if self._folder is None:
            return
        here = self._engine.reusable_tokens(token_ids)
        best = max(self._kept, key=lambda one: one.reusable(token_ids), default=None)
        if best is not None and best.reusable(token_ids) > here:
            self.keep(best)
            self._load(best)
        elif self._engine.position - here > MAX_DECODE_TOKENS:
            self.keep()
        self._forgets = forgets

    def leave(self) -> None:
        """Before a prompt that is read whole: keeps the sequence that the engine leaves. What is
        scored is no conversation, and takes no file.
        """
        self.keep()
        self._forgets = True

    def keep_prompt(self, token_ids: list[int], progress: Progress) -> None:
        """Behind ``resume``: reads the prompt up to what later turns may write otherwise, and keeps
        that, where it is worth a file.
        """
        engine = self._engine
        here = engine.reusable_tokens(token_ids)
        begun = token_ids[:-MAX_DECODE_TOKENS]
        if self._folder is None or len(begun) - here < FEWEST_TOKENS:
            return
        engine.rewind_to(here)
        engine.prefill(begun[here:], progress)
        self._write(None)

    def keep(self, wanted: KeptSequence | None = None) -> None:
        """Writes the engine's sequence, in the place of those that it goes on from but ``wanted``,
        which stays.
        """
        if not self._forgets:
            self._write(wanted)

    def _write(self, wanted: KeptSequence | None) -> None:
        token_ids = self._engine.token_ids
        if self._folder is None or len(token_ids) < FEWEST_TOKENS:
            return
        begun = [one for one in self._kept if token_ids[: len(one.token_ids)] == one.token_ids]
        if any(len(one.token_ids) == len(token_ids) for one in begun):
            return
        # Servers of other checkpoints and formats may have the same folder.
        text = json.dumps([self._engine.key.facts(), token_ids], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{SUFFIX}"
        undoable = self._engine.state.undoable_tokens
        try:
            self._engine.save_state(path)
        except UserError as error:
            _LOG.warning("%s", error)
            return
        self._drop([one for one in begun if one is not wanted])
        self._kept.append(KeptSequence(path, token_ids, undoable))
        others = [one for one in self._kept if one is not wanted]
        self._drop(others[: max(0, len(self._kept) - self._most)])

    def _load(self, one: KeptSequence) -> None:
        try:
            self._engine.load_state(one.path)
        except UserError as error:  # It was whole before: nobody can use it any more.
            _LOG.warning("%s", error)
            self._drop([one])
            return
        with suppress(OSError):  # The file of another user can be read and keeps its time.
            one.path.touch()
        self._kept.remove(one)
        self._kept.append(one)

    def _take(self, path: Path) -> None:
        try:
            saved = SavedState.open(path)
            saved.check(self._engine.key, self._engine.max_context)
        except UserError as error:
            _LOG.warning("not used: %s", error)
            return
        undoable = undoable_tokens(saved.position, saved.furthest)
        self._kept.append(KeptSequence(path, saved.token_ids, undoable))

    def _drop(self, sequences: Sequence[KeptSequence]) -> None:
        for one in sequences:
            try:
                one.path.unlink(missing_ok=True)
            except OSError as error:
                _LOG.warning("not removed: %s", error)
        self._kept = [one for one in self._kept if one not in sequences]


def _last_used(path: Path) -> float:
    """0 for a file that another server has removed meanwhile, as opening it says."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return 0.0
