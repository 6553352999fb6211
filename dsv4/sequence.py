"""The sequence of an engine: its tokens, what of it can be taken back or reused, and its file."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv4.caches.state import DecodeState
from dsv4.checkpoint.state_file import SavedState, StateKey, write_state
from dsv4.errors import UserError, shorten
from dsv4.generation import Run
from dsv4.token_ids import check_ids, check_integer, check_room, shared_beginning


class EngineSequence:
    """What an engine does with its one sequence besides computing."""

    def __init__(self, state: DecodeState, key: StateKey, max_context: int) -> None:
        self.state = state
        self.max_context = max_context
        self.key = key
        self._run: Run | None = None
        # Set before a step runs, so that it is right wherever an interruption leaves the state;
        # longer than the sequence where tokens were taken back.
        self._token_ids: list[int] = []

    @property
    def position(self) -> int:
        """Tokens of the current sequence so far. With drafts also those of a step of ``generate``
        that are still to be yielded.
        """
        return self.state.position

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the current sequence so far, as far as ``generate`` has yielded them."""
        return self._token_ids[: self.position]

    def reset(self) -> None:
        """Starts a new sequence: nothing of the previous one is visible to it."""
        self._end_run()
        self.state.start_sequence()

    def rewind(self, tokens: int) -> None:
        """Takes back the last ``tokens`` tokens, e.g. rejected draft tokens: at most 8, and none
        more than 11 behind the furthest position that this sequence has reached, because the rings
        remember no more. Raises ``UserError`` for more.
        """
        self._end_run()
        taken_back = check_integer("tokens", tokens, 0, self.state.undoable_tokens)
        self.state.set_position(self.position - taken_back)

    def rewind_to(self, position: int) -> None:
        """Takes back what is behind ``position``: as ``rewind``, or from any distance to 0, and to
        where a ``generate(reuse=True)`` of this sequence began and its prompt ended, and 8 tokens
        before it. Raises ``ValueError`` for other positions.
        """
        self._end_run()
        position = check_integer("position", position, 0)
        if position:
            self.state.go_back(position)
        else:
            self.state.start_sequence()

    def reusable_tokens(self, token_ids: Iterable[int]) -> int:
        """How many of ``token_ids``, a prompt from its start, ``generate(reuse=True)`` need not
        prefill: the beginning that the current sequence shares with them, as far as ``rewind_to``
        comes. The last token is always prefilled. Raises ``UserError`` for what is no list of ids.
        """
        ids = check_ids(token_ids, self.key.config.vocab_size, at_least=0)
        return self.state.reachable(shared_beginning(self.token_ids, ids[:-1]))

    def save_state(self, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Writes the sequence to a file that ``load_state`` goes on from: what the caches hold of
        it (decode.md#a-state-on-disk). ``path`` appears, or is replaced, when it is complete.

        ``notes``: strings of the caller's, which ``SavedState.notes`` has. Raises ``UserError`` for
        a sequence that has met NaN or was fed past the engine, notes that are no strings or longer
        than a header, a path that cannot be a file, and a disk without room.
        """
        file = _file("save_state", path)
        self._end_run()
        token_ids = self.token_ids
        if len(token_ids) != self.position:
            found = f"found {self.position} tokens, {len(token_ids)} of which the engine was given"
            raise UserError(f"save_state: {found}, expected all")
        self.state.wait()
        if self.state.met_nan:
            raise UserError("save_state: found a sequence that has met NaN, expected numbers")
        write_state(file, self.key, self.state, token_ids, notes or {})

    def load_state(self, path: str | Path) -> None:
        """Goes on with a sequence that ``save_state`` wrote, on any devices and in chunks of any
        length.

        Raises ``UserError`` with the sequence as it was for a file that is damaged or of another
        format, and for a state of another checkpoint, of caches that hold something else, or with
        more tokens than ``max_context``.
        """
        saved = SavedState.open(_file("load_state", path))
        saved.check(self.key, self.max_context)
        check_ids(saved.token_ids, self.key.config.vocab_size, f"{path}: token_ids", at_least=0)
        saved.check_rows(self.state)
        self._end_run()
        # The ids are those of the rows from the first moment at which there are any.
        self.state.start_sequence()
        self._token_ids = list(saved.token_ids)
        saved.restore(self.state)

    def _begin(self, token_ids: list[int], reuse: bool) -> int:
        """Begins the sequence of the prompt ``token_ids``: how many of them need no prefill, none
        without ``reuse``.
        """
        self._end_run()
        reused = self.reusable_tokens(token_ids) if reuse else 0
        if reused:
            self.state.go_back(reused)
            self.state.keep_point()
            # Drafts that were taken back may have met it, and steps that nobody has read.
            self.state.forget_nan()
        else:
            self.state.start_sequence()
        self._token_ids = list(token_ids)
        return reused

    def _start(self, ids: list[int]) -> None:
        """Begins a new sequence, which is to be of these tokens."""
        self.reset()
        self._token_ids = list(ids)

    def _whole(self, token_ids: Iterable[int]) -> list[int]:
        """The ids of a sequence as a list, if they are ids of this model and fit."""
        ids = self._ids(token_ids)
        check_room(len(ids), self.max_context)
        return ids

    def _ids(self, token_ids: Iterable[int]) -> list[int]:
        """As a list, if they are ids of this model."""
        return check_ids(token_ids, self.key.config.vocab_size)

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.end()
            self._run = None


def _file(call: str, path: str | Path) -> Path:
    """The path that ``call`` was given. Raises ``UserError`` for what no file can be called."""
    try:
        if b"\0" not in os.fsencode(path):
            return Path(path)
    except (TypeError, UnicodeEncodeError):  # A lone surrogate is none of UTF-8.
        pass
    raise UserError(f"{call}: found {shorten(path)}, expected the name of a file")
