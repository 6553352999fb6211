"""Conversations that others interrupt: their states come back from files."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4 import SamplingParams
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.serve import sequences
from dsv4.serve.answering import Question
from dsv4.serve.command import build_service
from dsv4.serve.flags import parse_arguments
from dsv4.serve.sequences import SUFFIX, KeptSequence, SavedSequences
from dsv4.serve.service import Service
from tests.serve.running import Running

pytestmark = pytest.mark.slow

# Nothing but the first token is common to the prompts.
FEWEST_TOKENS = 30
LENGTH = 40
PROMPTS = [[0, *((7 * place + 900 * one) % 2000 for place in range(LENGTH))] for one in range(3)]
A, B, C = PROMPTS


@pytest.fixture
def loaded(demo: Running, monkeypatch: pytest.MonkeyPatch) -> Service:
    """With the engine of the server that other tests ask; short prompts are worth a file."""
    monkeypatch.setattr(sequences, "FEWEST_TOKENS", FEWEST_TOKENS)
    return demo.service


def with_folder(loaded: Service, folder: Path, most: int = 2) -> Service:
    """The same engine, in a fresh sequence, with files in ``folder``."""
    engine = loaded.answering.engine
    engine.reset()
    arguments = parse_arguments(["--state-dir", str(folder), "--states", str(most)])
    return build_service(arguments, loaded.files, engine, loaded.worker)


def ask(
    service: Service, token_ids: list[int], tokens: int = 2, **fields: Any
) -> tuple[int, list[int]]:
    """How many tokens of the prompt were there, and the answer."""
    greedy = SamplingParams(temperature=0)
    question = Question(token_ids, tokens, greedy, (), frozenset(), **fields)
    read, *said, _ = service.answering.answer(question, lambda: None)
    return read.reused, [one.token_id for one in said]  # type: ignore[union-attr]


def files(folder: Path) -> set[Path]:
    return set(folder.glob(f"*{SUFFIX}"))


def test_a_conversation_goes_on_behind_another_one(loaded: Service, tmp_path: Path) -> None:
    """Its next turn reads only what is new, and says what it says where nothing interrupts."""
    service = with_folder(loaded, tmp_path)
    _, first = ask(service, A)
    longer = [*A, *first, 5, 6, 7]
    uninterrupted = ask(service, longer)
    service = with_folder(loaded, tmp_path)
    assert ask(service, A) == (0, first)
    assert ask(service, B)[0] == 0
    assert ask(service, longer) == uninterrupted
    assert uninterrupted[0] == len(A) + len(first) - 1
    # The longer conversation takes the place of the shorter one, which it begins with.
    ask(service, B)
    assert len(files(tmp_path)) == 2


def test_files_are_no_more_than_asked_for_and_the_oldest_goes(
    loaded: Service, tmp_path: Path
) -> None:
    service = with_folder(loaded, tmp_path)
    reused = []
    for prompt in (A, B, C, B, A):
        reused.append(ask(service, [*prompt, 5], 1)[0])
        assert len(files(tmp_path)) <= 2
    assert reused == [0, 0, 0, LENGTH + 1, 0]


def test_servers_of_two_checkpoints_may_have_one_folder(
    loaded: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded.answering.engine
    keys = (engine.key, replace(engine.key, checkpoint="another"))
    for key in (*keys, *keys):
        monkeypatch.setattr(engine, "key", key)
        service = with_folder(loaded, tmp_path)
        there = len(files(tmp_path))
        assert ask(service, [*A, 5], 1)[0] == (0 if there < 2 else LENGTH + 1)
        service.answering.keep_sequence()
    assert len(files(tmp_path)) == 2


def test_no_file_goes_before_there_are_too_many(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path, most=4)
    for prompt in (A, B, C):
        ask(service, [*prompt, 5], 1)
    service.answering.keep_sequence()
    assert len(files(tmp_path)) == 3
    assert ask(service, [*A, 5, 6], 1)[0] == LENGTH + 2


def test_conversations_that_take_turns_keep_their_files(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path, most=3)
    for prompt in (A, B, A, C, B):
        ask(service, [*prompt, 5], 1)
    service.answering.keep_sequence()
    assert len(files(tmp_path)) == 3


def test_the_oldest_file_stays_while_it_is_wanted(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path)
    for prompt in (A, B, C):
        ask(service, [*prompt, 5], 1)
    assert ask(service, [*A, 5, 6], 1)[0] == LENGTH + 2


def test_a_file_that_is_gone_back_to_is_not_the_oldest(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path)
    for prompt in (A, B, A, C):
        ask(service, [*prompt, 5], 1)
    service.answering.keep_sequence()
    assert ask(service, [*A, 5, 6], 1)[0] == LENGTH + 2


def test_of_a_file_that_is_found_no_more_is_taken_back_than_can_be(
    loaded: Service, tmp_path: Path
) -> None:
    """Its sequence has gone back already: another file, which shares less, is of more use."""
    engine = loaded.answering.engine
    for length, further in ((len(A), MAX_DECODE_TOKENS), (FEWEST_TOKENS, 0)):
        engine.reset()
        engine.prefill(A[:length])
        if further:
            engine.decode([5] * further)
            engine.rewind(further)
        engine.save_state(tmp_path / f"{length}{SUFFIX}")
    service = with_folder(loaded, tmp_path)
    assert ask(service, [*A[:-MAX_DECODE_TOKENS], 5], 1)[0] == FEWEST_TOKENS


def test_the_file_that_was_used_last_stays(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path, most=4)
    for prompt in (A, B, C):
        ask(service, prompt)
    service.answering.keep_sequence()
    ask(service, [*A, 5])
    service = with_folder(loaded, tmp_path, most=2)
    assert len(files(tmp_path)) == 2
    assert ask(service, [*A, 5])[0] >= LENGTH


def test_a_prompt_that_is_scored_takes_no_file_and_costs_none(
    loaded: Service, tmp_path: Path
) -> None:
    """The conversation that it displaces is kept as behind any other request."""
    service = with_folder(loaded, tmp_path)
    ask(service, [*A, 5], 1)
    for prompt in (B, C):
        ask(service, prompt, 1, scores_prompt=True)
        assert len(files(tmp_path)) == 1
    assert ask(service, [*A, 5, 6], 1)[0] == LENGTH + 2
    assert len(files(tmp_path)) == 1


def test_where_reasoning_is_dropped_the_prompt_is_kept_without_its_end(
    loaded: Service, tmp_path: Path
) -> None:
    """The next turn goes on behind it; an answer that nobody can go on with takes no file."""
    service = with_folder(loaded, tmp_path)
    plain = ask(service, A, 12)
    service = with_folder(loaded, tmp_path)
    assert ask(service, A, 12, forgets=True) == plain
    [first] = files(tmp_path)
    turn = [*A[:-1], *B[-FEWEST_TOKENS - 12 :]]
    assert ask(service, turn, 12, forgets=True)[0] >= len(A) - 8
    [second] = files(tmp_path)  # The longer prompt, in the place of the shorter one.
    assert second != first
    assert ask(service, [*turn[:-1], 5, 6], 12, forgets=True)[0] >= len(turn) - 8
    service.answering.keep_sequence()
    assert files(tmp_path) == {second}
    assert [ask(service, one, forgets=True)[0] for one in (C, [*turn, 5])] == [0, len(turn) - 8]


def test_of_a_prompt_that_is_kept_no_more_than_its_end_is_missing(
    loaded: Service, tmp_path: Path
) -> None:
    """What the next turn writes otherwise may begin before that, as far as it can be taken back."""
    service = with_folder(loaded, tmp_path)
    ask(service, A, forgets=True)
    ask(service, B)
    begun = A[: -2 * MAX_DECODE_TOKENS]
    assert ask(service, [*begun, 5])[0] == len(begun)


def test_a_file_that_the_sequence_has_gone_on_from_stays_while_it_is_wanted(
    loaded: Service, tmp_path: Path
) -> None:
    service = with_folder(loaded, tmp_path, most=3)
    ask(service, [*A, 5], 1)
    ask(service, B)
    longer = [*A, 5, *C[1:]]
    for _ in range(5):  # So many turns that no point is left behind which the short one goes on.
        ask(service, longer, 1)
        longer = [*longer, 6]
    assert service.answering.engine.reusable_tokens([*A, 5, 6]) == 0
    assert ask(service, [*A, 5, 6])[0] == LENGTH + 2


def test_a_few_tokens_that_are_taken_back_are_not_worth_a_file(
    loaded: Service, tmp_path: Path
) -> None:
    service = with_folder(loaded, tmp_path)
    ask(service, A, 1)
    assert ask(service, [*A[:-MAX_DECODE_TOKENS], 5])[0] == len(A) - MAX_DECODE_TOKENS
    assert files(tmp_path) == set()


def test_as_many_tokens_as_can_be_taken_back_are() -> None:
    kept = KeptSequence(Path("file"), [1, 2, 3, 4, 5], 2)
    assert kept.reusable([1, 2, 3, 9, 9]) == 3
    assert kept.reusable([1, 2, 9, 9, 9]) == 0


def test_short_prompts_are_not_worth_a_file(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path)
    for prompt in (A, B, C):
        ask(service, prompt[: FEWEST_TOKENS - 2], 1)
    assert files(tmp_path) == set()


def test_a_later_server_takes_what_an_earlier_one_kept(loaded: Service, tmp_path: Path) -> None:
    service = with_folder(loaded, tmp_path)
    ask(service, A)
    service.answering.keep_sequence()
    assert ask(with_folder(loaded, tmp_path), [*A, 5])[0] >= len(A) - 1


def test_a_file_that_another_server_removes_meanwhile_is_none(
    loaded: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / f"removed{SUFFIX}"
    monkeypatch.setattr(Path, "glob", lambda *_: [removed, removed])
    assert not SavedSequences(loaded.answering.engine, tmp_path, 2)._kept


def test_a_damaged_file_is_told_of_and_not_used(
    loaded: Service, tmp_path: Path, caplog: Any
) -> None:
    """It goes if it was whole; what is found at the start may be anybody's and stays."""
    service = with_folder(loaded, tmp_path)
    ask(service, A)
    ask(service, B)
    [file] = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "dsv4"):
        with_folder(loaded, tmp_path)
        assert files(tmp_path) == {file}
        assert ask(service, [*A, 5])[0] == 0
    assert len([record for record in caplog.messages if "damaged: its SHA-256" in record]) == 2
    assert files(tmp_path) == set()


def test_a_folder_that_is_gone_costs_no_answer(
    loaded: Service, tmp_path: Path, caplog: Any
) -> None:
    service = with_folder(loaded, tmp_path / "gone")
    ask(service, A)
    assert len(ask(service, B)[1]) == 2
    assert "gone" in caplog.text


def test_files_that_cannot_be_changed_cost_no_answer(
    loaded: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """As those of another user are; what is no file at all is not used."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not permitted")

    (tmp_path / f"link{SUFFIX}").symlink_to("nowhere")
    service = with_folder(loaded, tmp_path)
    assert f"not used: {tmp_path}" in caplog.text
    for prompt in (A, B):
        ask(service, [*prompt, 5], 1)
    monkeypatch.setattr(Path, "touch", refuse)
    assert ask(service, [*A, 5, 6], 1)[0] == LENGTH + 2
    for file in files(tmp_path):
        file.unlink()
        file.mkdir()
    for prompt in (C, B, A):
        ask(service, [*prompt, 6], 1)
    assert "not removed: " in caplog.text
