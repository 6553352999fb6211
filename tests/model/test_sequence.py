"""The sequence of an engine: what every call that moves it leaves of a run and of NaN."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from dsv4 import Engine, SamplingParams, UserError
from dsv4.caches.state import DecodeState
from dsv4.checkpoint.state_file import SavedState
from tests.model.tiny import random_ids, tiny_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
PROMPT = random_ids(10)
AHEAD = 5


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64, prefill_chunk=16)


@pytest.fixture(scope="module")
def saved(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state behind 7 tokens."""
    path = tmp_path_factory.mktemp("state") / "seven"
    engine.reset()
    engine.prefill(PROMPT[:7])
    engine.save_state(path)
    return path


@pytest.fixture
def run(engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[int, None, None]:
    """A run that has given two tokens, the second from the first of several steps queued ahead."""

    def following(*_: Any) -> Generator[int, None, None]:
        start = engine.position
        try:
            engine.state.advance(AHEAD)
            yield from range(3, 3 + AHEAD)
        finally:
            engine.state.set_position(start + 1)

    monkeypatch.setattr(engine, "following", following)
    tokens = engine.generate(PROMPT, 20, GREEDY, NO_STOP, reuse=True)
    given = [next(tokens), next(tokens)]
    assert given[1] == 3
    assert engine.position == 10 + AHEAD
    assert engine.token_ids == [*PROMPT, *given]
    return tokens


MOVES: dict[str, tuple[Callable[[Engine, Path], Any], int]] = {
    "reset": (lambda engine, _: engine.reset(), 0),
    "rewind": (lambda engine, _: engine.rewind(1), 10),
    "rewind_to": (lambda engine, _: engine.rewind_to(10), 10),
    "rewind_to the beginning": (lambda engine, _: engine.rewind_to(0), 0),
    "save_state": (lambda engine, saved: engine.save_state(saved.with_name("again")), 11),
    "load_state": (lambda engine, saved: engine.load_state(saved), 7),
    "prefill": (lambda engine, _: engine.prefill([3, 4]), 13),
    "decode": (lambda engine, _: engine.decode([3, 4]), 13),
    "logits": (lambda engine, _: engine.logits([3, 4]), 2),
    "prompt_logprobs": (lambda engine, _: engine.prompt_logprobs([3, 4], 1), 2),
    "trace": (lambda engine, _: engine.trace([3, 4], ["hidden"]), 2),
    "generate": (lambda engine, _: engine.generate([3, 4], 1), 0),
    "generate with reuse": (lambda engine, _: engine.generate([3, 4], 1, reuse=True), 11),
}


@pytest.mark.parametrize("move", MOVES)
def test_steps_that_were_queued_ahead_are_taken_back_before_a_sequence_moves(
    move: str, engine: Engine, saved: Path, run: Generator[int, None, None]
) -> None:
    call, position = MOVES[move]
    call(engine, saved)
    assert engine.position == len(engine.token_ids) == position
    with pytest.raises(RuntimeError, match="used for something else"):
        next(run)
    assert engine.position == position


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("move", ["prefill", "decode"])
def test_steps_that_were_queued_ahead_take_no_room(
    move: str, engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "max_context", 13)
    MOVES[move][0](engine, saved)
    assert engine.position == 13


def test_a_run_that_is_closed_counts_no_steps_that_were_queued_ahead(
    engine: Engine, run: Generator[int, None, None]
) -> None:
    run.close()
    assert engine.position == 11
    assert engine.last_run is not None
    assert engine.last_run.decode_tokens == 1


@pytest.mark.usefixtures("run")
def test_a_state_has_the_tokens_that_were_yielded(engine: Engine, tmp_path: Path) -> None:
    yielded = engine.token_ids
    engine.save_state(tmp_path / "state", {"a": "note"})
    found = SavedState.open(tmp_path / "state")
    assert found.token_ids == yielded[:11]
    assert found.notes == {"a": "note"}


@pytest.mark.parametrize("move", ["reset", "rewind_to the beginning", "load_state", "logits"])
def test_a_new_sequence_has_met_no_nan(move: str, engine: Engine, saved: Path) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    engine.state.nan_1.fill_(1)
    MOVES[move][0](engine, saved)
    assert not engine.state.met_nan


@pytest.mark.parametrize("move", ["logits", "prompt_logprobs", "trace"])
def test_tokens_that_are_looked_into_are_a_sequence_that_goes_on(
    move: str, engine: Engine, saved: Path
) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    MOVES[move][0](engine, saved)
    engine.decode([5])
    assert engine.token_ids == [3, 4, 5]


def test_what_is_reused_has_met_no_nan(engine: Engine) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    engine.state.nan_1.fill_(1)
    assert len(list(engine.generate(PROMPT, 3, GREEDY, NO_STOP, reuse=True))) == 3
    assert engine.last_run is not None
    assert engine.last_run.reused_tokens == 9


@pytest.mark.parametrize(("reuse", "kept"), [(False, []), (True, [10])])
def test_only_runs_that_reuse_keep_the_end_of_their_prompt(
    reuse: bool, kept: list[int], engine: Engine
) -> None:
    """It takes memory and waits for the device."""
    engine.reset()
    list(engine.generate(PROMPT, 3, GREEDY, NO_STOP, reuse=reuse))
    assert [point.position for point in engine.state.points] == kept


def test_as_many_tokens_of_another_sequence_are_found_out(engine: Engine) -> None:
    def use(done: int, total: int) -> None:
        engine.logits([3] * total)

    run = engine.generate(PROMPT, 3, GREEDY, NO_STOP, use)
    with pytest.raises(RuntimeError, match="used for something else"):
        next(run)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_run_that_is_begun_late_ends_the_one_under_way(reuse: bool, engine: Engine) -> None:
    expected = list(engine.generate(PROMPT, 3, GREEDY, NO_STOP))
    late = engine.generate(PROMPT, 3, GREEDY, NO_STOP, reuse=reuse)
    early = engine.generate(PROMPT[:7], 3, GREEDY, NO_STOP)
    next(early)
    first = next(late)
    with pytest.raises(RuntimeError, match="used for something else"):
        next(early)
    assert [first, *late] == expected


def test_prompts_fill_the_context_and_no_more(engine: Engine) -> None:
    engine.reset()
    engine.prefill([3] * 60)
    with pytest.raises(UserError, match="found a sequence of 65 tokens, expected at most 64"):
        engine.prefill([4] * 5)
    assert engine.position == 60
    engine.prefill([4] * 4)
    assert engine.token_ids == [3] * 60 + [4] * 4


def test_nan_of_tokens_that_were_taken_back_is_none_of_a_prompt(engine: Engine) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    engine.state.nan_1.fill_(1)
    engine.rewind(1)
    engine.prefill([3])
    assert engine.token_ids == [*PROMPT[:9], 3]


def test_tokens_take_the_place_of_those_that_were_taken_back(engine: Engine) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    engine.rewind(3)
    engine.decode([3, 4])
    assert engine.token_ids == [*PROMPT[:7], 3, 4]


def test_a_prompt_that_is_interrupted_leaves_the_ids_of_its_chunks(engine: Engine) -> None:
    def interrupt(done: int, total: int) -> None:
        assert (done, total) == (16, 20)
        raise KeyboardInterrupt

    ids = random_ids(20)
    engine.reset()
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(ids, interrupt)
    assert engine.token_ids == ids[:16]


def test_nothing_of_no_prompt_can_be_reused(engine: Engine) -> None:
    assert [engine.reusable_tokens(ids) for ids in ([], PROMPT[:1])] == [0, 0]


def test_all_of_a_prompt_but_its_last_token_can_be_reused(engine: Engine) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    prompts = (PROMPT, [*PROMPT, 3], PROMPT[:5], [*PROMPT[:4], 88])
    assert [engine.reusable_tokens(ids) for ids in prompts] == [9, 10, 4, 4]
    engine.rewind(2)
    assert engine.reusable_tokens(PROMPT) == 8


def test_what_was_fed_past_the_engine_is_not_saved(engine: Engine, tmp_path: Path) -> None:
    engine.reset()
    engine.prefill(PROMPT[:3])
    engine.steps.run([5, 6])
    expected = "save_state: found 5 tokens, 3 of which the engine was given, expected all"
    with pytest.raises(UserError, match=expected):
        engine.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_the_ids_of_a_state_are_those_of_the_vocabulary(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "state"
    engine.reset()
    engine.save_state(path)
    engine.prefill(PROMPT)
    engine.load_state(path)
    assert engine.token_ids == []
    engine.prefill(PROMPT)
    engine._token_ids[2] = 89
    engine.save_state(path)
    with pytest.raises(UserError) as caught:
        engine.load_state(path)
    assert str(caught.value) == f"{path}: token_ids: found 89, expected ids from 0 to 88"


def test_a_state_of_other_rows_is_refused_before_a_run_is_ended(
    engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_rows(_: SavedState, state: DecodeState) -> None:
        assert state is engine.state
        raise UserError("rows")

    monkeypatch.setattr(SavedState, "check_rows", check_rows)
    tokens = engine.generate(PROMPT, 4, GREEDY, NO_STOP)
    next(tokens)
    with pytest.raises(UserError, match="rows"):
        engine.load_state(saved)
    assert engine.token_ids == PROMPT
    assert len(list(tokens)) == 3


def test_a_load_that_is_interrupted_leaves_the_ids_of_the_rows(
    engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = SavedState.restore

    def interrupted(state: SavedState, *arguments: Any) -> None:
        restore(state, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(SavedState, "restore", interrupted)
    engine.logits(random_ids(12, seed=1))
    with pytest.raises(KeyboardInterrupt):
        engine.load_state(saved)
    assert engine.token_ids == PROMPT[:7]


@pytest.mark.parametrize("call", ["prefill", "prompt_logprobs", "run_traced"])
def test_a_word_for_a_function_is_refused_before_a_run_is_ended(engine: Engine, call: str) -> None:
    tokens = engine.generate(PROMPT, 4, GREEDY, NO_STOP)
    next(tokens)
    arguments = (3, "x") if call == "prompt_logprobs" else ("x",)
    with pytest.raises(UserError, match=r"^(progress|watch): found 'x', expected a (fu|Watch)"):
        getattr(engine, call)(PROMPT, *arguments)
    assert len(list(tokens)) == 3
