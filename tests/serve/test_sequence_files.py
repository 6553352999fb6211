"""Which files sequences have, by an engine that can go back by two tokens and no more."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.errors import UserError
from dsv4.serve import sequences
from dsv4.serve.sequences import SUFFIX, SavedSequences
from dsv4.token_ids import shared_beginning

UNDOABLE = 2
A = list(range(20))
B = list(range(100, 120))
C = list(range(200, 220))


class Reader:
    """Reads prompts and says nothing."""

    key = SimpleNamespace(facts=dict)
    state = SimpleNamespace(undoable_tokens=UNDOABLE)

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def reusable_tokens(self, token_ids: Sequence[int]) -> int:
        shared = shared_beginning(self.token_ids, token_ids[:-1])
        return shared if self.position - shared <= UNDOABLE else 0

    def save_state(self, path: Path) -> None:
        path.write_text(json.dumps(self.token_ids))

    def load_state(self, path: Path) -> None:
        try:
            self.token_ids = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedSequences:
    monkeypatch.setattr(sequences, "FEWEST_TOKENS", 10)
    return SavedSequences(Reader(), tmp_path, 2)  # type: ignore[arg-type]


def read(saved: SavedSequences, *prompts: list[int]) -> list[int]:
    """How many tokens of every prompt were there."""
    engine = saved._engine
    reused = []
    for prompt in prompts:
        saved.resume(prompt, False)
        reused.append(engine.reusable_tokens(prompt))
        engine.token_ids = list(prompt)  # type: ignore[misc]
    return reused


def test_a_file_that_a_longer_one_has_replaced_is_not_gone_back_to(
    saved: SavedSequences, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longer = [*A, *B]
    assert read(saved, A, B, longer, B) == [0, 0, 20, 19]
    files = [json.loads(file.read_text()) for file in tmp_path.glob(f"*{SUFFIX}")]
    assert sorted(files) == [longer, B]
    assert read(saved, [*A, 5]) == [0]
    assert caplog.records == []


def test_a_file_stays_where_the_longer_one_in_its_place_cannot_be_written(
    saved: SavedSequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Reader, path: Path) -> None:
        raise UserError(f"{path}: No space left on device")

    assert read(saved, A, B, [*A, *B]) == [0, 0, len(A)]
    with monkeypatch.context() as full:
        full.setattr(Reader, "save_state", refuse)
        read(saved, C)
    files = [json.loads(file.read_text()) for file in tmp_path.glob(f"*{SUFFIX}")]
    assert sorted(files) == sorted([A, B])
    assert read(saved, [*A, 5]) == [len(A)]


def test_a_file_that_another_server_has_removed_goes_without_a_word(
    saved: SavedSequences, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(saved, A, B)
    for file in tmp_path.glob(f"*{SUFFIX}"):
        file.unlink()
    read(saved, C, [*C[1:], *C], B)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 2
    assert caplog.records == []


def test_what_a_server_was_writing_when_it_was_killed_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".dsv4-new-{'a' * 16}").touch()
    (tmp_path / "another").touch()
    SavedSequences(Reader(), tmp_path, 2)  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["another"]
