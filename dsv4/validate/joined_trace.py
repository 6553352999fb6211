"""The trace of an engine that wrote a file, or one for each of its ranks (docs/traces.md)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.errors import UserError, shorten
from dsv4.json_object import JsonReader
from dsv4.validate.trace_file import TraceFile

# How the parts of ranks become one value where the files do not say it (docs/traces.md): the first
# pattern that fits.
DEFAULT_JOINS = {
    "layers.*.attn.q": "concat:1",
    "layers.*.attn.heads": "concat:1",
    "logits": "concat:-1",
    "*": "equal",
}
# Integers of as many bytes: 0.0 equals -0.0, but its bits do not.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unequal(NamedTuple):
    """A value that ranks should have in common and do not: which ranks, and by how much at most."""

    ranks: tuple[int, int]
    difference: float


def unequal_lines(unequal: Mapping[str, Unequal]) -> Iterator[str]:
    """Lines with the values that ranks do not have in common as they should."""
    for name, (ranks, difference) in unequal.items():
        apart = f"ranks {ranks[0]} and {ranks[1]} differ by up to {difference:.3g}"
        yield f"{name}: {apart}; a value of which ranks hold parts needs a join of its own"


class JoinedTrace:
    """The trace of one engine: a file, or the files of its ranks in any order, joined.

    ``unequal`` gathers, while rows are read, the values that were to be equal on all ranks and are
    not. Raises ``UserError`` for a missing rank, a rank given twice, ranks of different tokens or
    of another number of ranks.
    """

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        self.files = _in_rank_order([TraceFile(path, stack) for path in paths])
        self.unequal: dict[str, Unequal] = {}
        first = self.files[0]
        for file in self.files[1:]:
            expect_same_tokens(file, first)
        self.path = first.path
        self.token_ids = first.token_ids
        self.names = frozenset[str]().union(*(file.names for file in self.files))
        self.config = first.object("config")
        if self.config.get("vocab_size") is not None:
            JsonReader(self.config, f"{self.path}: config").integer("vocab_size", 1, 2**31)
        self._rules = [*first.object("join").items(), *DEFAULT_JOINS.items()]

    def shape(self, name: str) -> list[int]:
        """Of the joined value. Raises ``UserError`` when the ranks' shapes or dtypes do not fit
        together.
        """
        rule = self._rule(name)
        held = self._held(name, rule)
        shapes = [file.shape(name) for file in held]
        shape = list(shapes[0])
        dim = self._dimension(name, rule, len(shape))
        dtype = held[0].dtype(name)
        for file, found in zip(held, shapes, strict=True):
            if file.dtype(name) != dtype:
                expected = f"{dtype} as in {held[0].path.name}"
                raise UserError(
                    f"{file.path}: {name}: found {file.dtype(name)}, expected {expected}"
                )
            fits = len(found) == len(shape) and all(
                a == b or index == dim
                for index, (a, b) in enumerate(zip(found, shape, strict=True))
            )
            if not fits:
                expected = f"{shape} as in {held[0].path.name} (join: {rule})"
                raise UserError(f"{file.path}: {name}: found {found}, expected {expected}")
        if dim is not None:
            shape[dim] = sum(found[dim] for found in shapes)
        return self._cut(name, shape)

    def dtype(self, name: str) -> str:
        """Of the value in the first file that has it, as safetensors names it."""
        return self._held(name, self._rule(name))[0].dtype(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the joined value; a sum is float32."""
        rule = self._rule(name)
        held = self._held(name, rule)
        parts = [file.rows(name, start, stop) for file in held]
        if rule == "sum":
            joined = torch.stack([part.float() for part in parts]).sum(0)
        elif (dim := self._dimension(name, rule, parts[0].dim())) is not None:
            joined = torch.cat(parts, dim)
        else:
            joined = parts[0]
            ranks = [self.files.index(file) for file in held]
            for rank, part in zip(ranks[1:], parts[1:], strict=True):
                self._note(name, (ranks[0], rank), joined, part)
        return joined[..., : self._columns(name, joined.shape[-1])]

    def join_note(self, name: str) -> str:
        """Words for an error about the shape of a value that ranks hold; none of a lone file."""
        return f" (join: {self._rule(name)})" if len(self.files) > 1 else ""

    def _rule(self, name: str) -> str:
        rule = next(rule for pattern, rule in self._rules if fnmatchcase(name, pattern))
        if isinstance(rule, str) and re.fullmatch(r"equal|sum|concat:(-?[1-9])", rule):
            return rule
        expected = "'equal', 'sum' or 'concat:DIM' with another dimension than 0"
        raise UserError(f"{self.path}: join: {name}: found {rule!r}, expected {expected}")

    def _dimension(self, name: str, rule: str, dimensions: int) -> int | None:
        """The dimension that ``concat`` joins along."""
        kind, _, text = rule.partition(":")
        if kind != "concat":
            return None
        dim = int(text) if int(text) > 0 else int(text) + dimensions
        if not 0 < dim < dimensions:
            expected = f"one of its {dimensions} dimensions but the first"
            raise UserError(f"{self.path}: join: {name}: found {rule!r}, expected {expected}")
        return dim

    def _held(self, name: str, rule: str) -> list[TraceFile]:
        """The files with the value: for ``equal`` some are enough, the other rules need all."""
        held = [file for file in self.files if name in file.names]
        if rule != "equal":
            for file in self.files:
                if name not in file.names:
                    raise UserError(f"{file.path}: {name}: not in this rank (join: {rule})")
        return held

    def _columns(self, name: str, width: int) -> int:
        """Columns without the padding of the vocabulary."""
        vocabulary = self.config.get("vocab_size")
        return min(width, vocabulary) if name == "logits" and isinstance(vocabulary, int) else width

    def _cut(self, name: str, shape: list[int]) -> list[int]:
        return [*shape[:-1], self._columns(name, shape[-1])]

    def _note(self, name: str, ranks: tuple[int, int], first: Tensor, part: Tensor) -> None:
        bits = _BITS[first.dtype.itemsize]
        same = first.view(bits) == part.view(bits)
        if not bool(same.all()):
            apart = (first.double() - part.double()).abs().nan_to_num(torch.inf, torch.inf)
            difference = float(apart.masked_fill(same, 0).max())
            before = self.unequal.get(name)
            if before is None or before.difference < difference:
                self.unequal[name] = Unequal(ranks, difference)


def trace_with_ranks(path: Path, stack: ExitStack) -> JoinedTrace:
    """The trace in a file; of a rank's file, with those of the other ranks, which lie beside it and
    whose names differ in the number behind ``rank`` alone. Raises ``UserError``.
    """
    file = TraceFile(path, stack)
    ranks = _number(file, "ranks", True)
    if ranks == 1:
        return JoinedTrace([path], stack)
    own = f"rank{_number(file, 'rank', True)}"
    paths = []
    for rank in range(ranks):
        other = path.with_name(path.name.replace(own, f"rank{rank}"))
        if own not in path.name or not other.is_file():
            expected = f"the files of the others beside it, named like it but for {own}"
            raise UserError(f"{path}: found {own} of {ranks} ranks, expected {expected}")
        paths.append(other)
    return JoinedTrace(paths, stack)


def expect_same_tokens(found: TraceFile | JoinedTrace, expected: TraceFile | JoinedTrace) -> None:
    """Raises ``UserError`` with the first token that differs between two traces."""
    tokens = found.token_ids
    others = expected.token_ids
    where = f"as in {expected.path.name}"
    if len(tokens) != len(others):
        raise UserError(
            f"{found.path}: token_ids: found {len(tokens)}, expected {len(others)} {where}"
        )
    for token, (a, b) in enumerate(zip(tokens, others, strict=True)):
        if a != b:
            raise UserError(f"{found.path}: token_ids[{token}]: found {a}, expected {b} {where}")


def expect_tokens_of(trace: JoinedTrace, config: ModelConfig) -> None:
    """Raises ``UserError`` for a token id that the model does not have, and for more tokens than it
    was made for.
    """
    tokens = len(trace.token_ids)
    if tokens > config.max_position_embeddings:
        expected = f"at most {config.max_position_embeddings} (max_position_embeddings)"
        raise UserError(f"{trace.path}: token_ids: found {tokens}, expected {expected}")
    vocabulary = config.vocab_size
    for token, found in enumerate(trace.token_ids):
        if not 0 <= found < vocabulary:
            expected = f"0 to {vocabulary - 1}"
            raise UserError(f"{trace.path}: token_ids[{token}]: found {found}, expected {expected}")


def _in_rank_order(files: list[TraceFile]) -> list[TraceFile]:
    by_rank: dict[int, TraceFile] = {}
    ranks = _number(files[0], "ranks", len(files) == 1)
    for file in files:
        rank = _number(file, "rank", len(files) == 1)
        found = _number(file, "ranks", len(files) == 1)
        if found != ranks:
            where = f"as in {files[0].path.name}"
            raise UserError(f"{file.path}: ranks: found {found}, expected {ranks} {where}")
        if rank in by_rank:
            raise UserError(f"{file.path}: rank: found {rank}, which {by_rank[rank].path} is too")
        by_rank[rank] = file
    wanted = range(ranks)
    for rank in wanted:
        if rank not in by_rank:
            given = ", ".join(map(str, sorted(by_rank)))
            raise UserError(f"{files[0].path}: ranks: found rank {given}, expected rank {rank} too")
    for rank in sorted(by_rank):
        if rank not in wanted:
            raise UserError(f"{by_rank[rank].path}: rank: found {rank}, expected below {ranks}")
    return [by_rank[rank] for rank in wanted]


def _number(file: TraceFile, key: str, alone: bool) -> int:
    text = file.metadata.get(key)
    if text is None and alone:
        return 0 if key == "rank" else 1
    least = 0 if key == "rank" else 1
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        expected = f"a number from {least} in the metadata of a rank's file (docs/traces.md)"
        raise UserError(f"{file.path}: {key}: found {shorten(text)}, expected {expected}")
    return int(text)
