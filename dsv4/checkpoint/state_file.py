"""State files: what a sequence keeps on the devices, as safetensors (decode.md#a-state-on-disk)."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dsv4.caches.filled import DRAFT, FilledRows, filled_draft_rows, filled_rows
from dsv4.caches.point import kept_furthest, undoable_tokens
from dsv4.caches.state import DecodeState
from dsv4.checkpoint.problems import printable
from dsv4.checkpoint.shard import (
    Header,
    StoredTensor,
    check_header_text,
    map_tensor,
    read_whole_header,
)
from dsv4.checkpoint.writer import StoredType, lay_out_file, new_file
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError, shorten
from dsv4.json_object import JsonReader, parse_json_object
from dsv4.limits import MAX_TAKEN_BACK

FORMAT = "dsv4-state/2"
# Files of it have no rows of a draft module.
_OLDER_FORMAT = "dsv4-state/1"
TOKENS = "token_ids"
_NO_DIGEST = "0" * 64
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class StateKey:
    """What a state belongs to: only an engine with the same key can go on with it.

    ``checkpoint`` is ``checkpoint_identity``, "" for weights that come from no folder. ``kv_rows``
    and ``index_rows``: what the caches hold, "fp8" or the dtype of rows that are not quantised.
    """

    config: ModelConfig
    checkpoint: str
    kv_rows: str
    index_rows: str

    @classmethod
    def of(cls, config: ModelConfig, engine: EngineConfig, checkpoint: str) -> "StateKey":
        """The key of an engine that runs a checkpoint with ``engine``. It says nothing of a draft
        module: a sequence goes on with another one, or without.
        """
        kv_rows, index_rows = (
            "fp8" if dtype == "fp8" else engine.compute_dtype
            for dtype in (engine.kv_dtype, engine.index_dtype or engine.kv_dtype)
        )
        return cls(replace(config, dspark=None), checkpoint, kv_rows, index_rows)

    def facts(self) -> dict[str, Any]:
        """The key as JSON has it."""
        return json.loads(json.dumps(asdict(self)))


def write_state(
    path: Path,
    key: StateKey,
    state: DecodeState,
    token_ids: Sequence[int],
    notes: Mapping[str, str],
) -> None:
    """Writes the state behind ``token_ids``; ``path`` appears, or changes, when it is complete.

    ``notes`` are strings of the caller's. Raises ``UserError`` when they are anything else or too
    long, when ``path`` cannot be a file and when the disk has no room.
    """
    notes = _strings(path, "notes", notes)
    rows = list(filled_rows(state.layers, state.position, state.undoable_tokens))
    furthest = kept_furthest(state.position, state.furthest)
    facts = {**key.facts(), "furthest": furthest, "notes": notes}
    draft = state.draft
    if draft is not None and draft.is_whole(state.position, state.undoable_tokens):
        facts["draft"] = draft.module
        rows += filled_draft_rows(draft, state.position, state.undoable_tokens)
    stored = {TOKENS: StoredType(torch.int64, (len(token_ids),))}
    stored.update({one.name: StoredType(one.store.dtype, one.shape) for one in rows})
    metadata = {"format": FORMAT, "sha256": _NO_DIGEST, "state": json.dumps(facts)}
    header, offsets = lay_out_file(stored, metadata)
    check_header_text(path, header[8:])
    digest = hashlib.sha256(header)
    parts = {one.name: one.parts() for one in rows}
    parts[TOKENS] = iter([torch.tensor(token_ids, dtype=torch.int64)])
    nbytes = len(header) + sum(one.nbytes for one in stored.values())
    with new_file(path, nbytes) as file:
        file.write(header)
        # In the order of the file, which is that of the digest.
        for name, offset in offsets.items():
            assert file.tell() == offset, name
            for part in parts[name]:
                data = part.cpu().reshape(-1).view(torch.uint8).numpy().data
                digest.update(data)
                file.write(data)
        file.seek(0)
        file.write(_with_digest(header, _NO_DIGEST, digest.hexdigest()))


@dataclass(frozen=True)
class SavedState:
    """A state file that is whole: nothing of it is other than it was written.

    ``token_ids`` are those of the sequence, ``notes`` what the caller of ``write_state`` gave.
    """

    path: Path
    token_ids: list[int]
    furthest: int
    notes: dict[str, str]
    _facts: dict[str, Any]
    _tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: str | Path) -> "SavedState":
        """Reads the file once, to compare its checksum. Raises ``UserError`` for anything but a
        whole file of this format.
        """
        path = Path(path)
        header = read_whole_header(path)
        metadata = _strings(path, "metadata", header.metadata)
        found = metadata.get("format")
        if found not in (FORMAT, _OLDER_FORMAT):
            raise UserError(f"{path}: format: found {shorten(found)}, expected {FORMAT!r}")
        _check_digest(path, header, metadata.get("sha256", ""))
        facts = parse_json_object(metadata.get("state", ""), f"{path}: state")
        notes = _strings(path, "notes", facts.get("notes"))
        tensors = dict(header.tensors)
        tokens = tensors.pop(TOKENS, None)
        if tokens is None or tokens.dtype != torch.int64 or len(tokens.shape) != 1:
            raise UserError(f"{path}: {TOKENS}: found {_type(tokens)}, expected int64 [T]")
        token_ids = map_tensor(tokens).tolist()
        reader = JsonReader(facts, f"{path}: state")
        furthest = reader.integer("furthest", len(token_ids), len(token_ids) + MAX_TAKEN_BACK)
        # Older files say how far the sequence came itself.
        furthest = kept_furthest(len(token_ids), furthest)
        return cls(path, token_ids, furthest, notes, facts, tensors)

    @property
    def position(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)

    def check(self, key: StateKey, max_context: int) -> None:
        """Raises ``UserError`` unless an engine with this key and context can go on with it."""
        expected = key.facts()
        config = JsonReader(self._facts, f"{self.path}: state").child("config")
        found = {} if config is None else config.values
        for name, value in expected.pop("config").items():
            self._expect(f"config.{name}", found.get(name), value)
        self._expect("checkpoint", self._facts.get("checkpoint"), expected["checkpoint"])
        for name, field in (("kv_rows", "kv_dtype"), ("index_rows", "index_dtype")):
            advice = f" (EngineConfig.{field})"
            self._expect(name, self._facts.get(name), expected[name], advice)
        if self.position > max_context:
            raise UserError(
                f"{self.path}: found {self.position} tokens, "
                f"expected at most {max_context} (EngineConfig.max_context)"
            )

    def check_rows(self, state: DecodeState) -> None:
        """Raises ``UserError`` unless the tensors of the file are those of ``state`` behind this
        sequence. Rows of another draft module than that of ``state`` are no matter.
        """
        tensors = self._tensors
        if "draft" in self._facts and not self._has_rows_of(state):
            tensors = {name: one for name, one in tensors.items() if not name.startswith(DRAFT)}
        expected = {one.name: StoredType(one.store.dtype, one.shape) for one in self._rows(state)}
        for name in sorted(tensors.keys() | expected.keys()):
            self._expect(printable(name), _type(tensors.get(name)), _type(expected.get(name)))

    def restore(self, state: DecodeState) -> None:
        """Puts the rows into ``state`` and its ranks, which have been checked and have no tokens:
        they stand behind the rows then. An interruption leaves a sequence without tokens.
        """
        for one in (one for rank in state.ranks for one in self._rows(rank)):
            saved = map_tensor(self._tensors[one.name])
            done = 0
            for part in one.parts():
                part.copy_(saved[done : done + len(part)])
                done += len(part)
        state.resume(self.position, self.furthest)
        if state.draft is not None and self._has_rows_of(state):
            state.draft.resume(self.position, state.undoable_tokens)

    def _rows(self, state: DecodeState) -> Iterator[FilledRows]:
        undoable = undoable_tokens(self.position, self.furthest)
        yield from filled_rows(state.layers, self.position, undoable)
        if state.draft is not None and self._has_rows_of(state):
            yield from filled_draft_rows(state.draft, self.position, undoable)

    def _has_rows_of(self, state: DecodeState) -> bool:
        """Whether the file has rows of the draft module that ``state`` is for."""
        return state.draft is not None and self._facts.get("draft") == state.draft.module

    def _expect(self, name: str, found: object, expected: object, advice: str = "") -> None:
        if found != expected:
            raise UserError(
                f"{self.path}: {name}: found {shorten(found)}, expected {shorten(expected)}{advice}"
            )


def _type(stored: StoredTensor | StoredType | None) -> str:
    if stored is None:
        return "no such tensor"
    return f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"


def _strings(path: Path, name: str, found: object) -> dict[str, str]:
    if isinstance(found, Mapping) and all(isinstance(one, str) for one in chain(*found.items())):
        return dict(found)
    raise UserError(f"{path}: {name}: found {shorten(found)}, expected an object of strings")


def _with_digest(header: bytes, old: str, new: str) -> bytes:
    """The beginning of a file with another checksum in its place; ``old`` may be any text."""
    found = f'"sha256":"{old}"'.encode(errors="backslashreplace")
    return header.replace(found, f'"sha256":"{new}"'.encode(), 1)


def _check_digest(path: Path, header: Header, found: str) -> None:
    """Raises ``UserError`` unless ``found`` is the checksum of the file: SHA-256 with zeros in the
    place of the checksum.
    """
    digest = hashlib.sha256(len(header.text).to_bytes(8, "little"))
    digest.update(_with_digest(header.text, found, _NO_DIGEST))
    try:
        with path.open("rb") as file:
            file.seek(8 + len(header.text))
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != found:
        values = f"found {digest.hexdigest()}, expected {shorten(found)}"
        raise UserError(f"{path}: damaged: its SHA-256 is not what it says: {values}")
