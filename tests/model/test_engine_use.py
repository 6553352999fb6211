"""One engine used by several callers: what ends a generation, and what a caller owns."""

import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4 import Engine, SamplingParams, UserError
from dsv4.progress import Progress
from tests.model.tiny import random_ids, tiny_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
FIRST = random_ids(10)
SECOND = random_ids(12, seed=1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64, prefill_chunk=8)


def run_of(engine: Engine, prompt: list[int], tokens: int = 6) -> Generator[int, None, None]:
    return engine.generate(prompt, tokens, GREEDY, NO_STOP)


USES: dict[str, Callable[[Engine], Any]] = {
    "another run": lambda e: next(run_of(e, SECOND)),
    "another run that nobody asks": lambda e: run_of(e, SECOND),
    "logits": lambda e: e.logits(SECOND),
    "trace": lambda e: e.trace(SECOND),
    "prefill": lambda e: e.prefill(SECOND),
    "decode": lambda e: e.decode([3]),
    "rewind": lambda e: e.rewind(1),
    "reset": lambda e: e.reset(),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_run_raises_when_the_engine_was_used_between_two_tokens(use: str, engine: Engine) -> None:
    expected = list(run_of(engine, FIRST))
    run = run_of(engine, FIRST)
    assert list(islice(run, 2)) == expected[:2]
    USES[use](engine)
    with pytest.raises(RuntimeError, match="used for something else meanwhile"):
        next(run)
    assert list(run) == []
    assert list(run_of(engine, FIRST)) == expected


def test_a_run_that_another_call_ended_leaves_no_statistics(engine: Engine) -> None:
    list(run_of(engine, SECOND))
    before = engine.last_run
    run = run_of(engine, FIRST)
    next(run)
    engine.reset()
    with pytest.raises(RuntimeError, match="used for something else"):
        next(run)
    assert engine.last_run is before


def test_what_ended_a_run_is_itself_not_disturbed(engine: Engine) -> None:
    expected = list(run_of(engine, SECOND))
    old = run_of(engine, FIRST)
    next(old)
    new = run_of(engine, SECOND)
    found = list(islice(new, 2))
    with pytest.raises(RuntimeError, match="used for something else"):
        next(old)
    found += islice(new, 1)
    old.close()
    del old
    assert found + list(new) == expected
    assert engine.last_run is not None
    assert (engine.last_run.prefill_tokens, engine.last_run.finish_reason) == (12, "length")


@pytest.mark.parametrize("how", ["close", "delete", "keep"])
def test_a_run_that_was_given_up_disturbs_nothing(how: str, engine: Engine) -> None:
    expected = list(run_of(engine, SECOND))
    run = run_of(engine, FIRST)
    next(run)
    if how == "close":
        run.close()
    elif how == "delete":
        del run
    assert list(run_of(engine, SECOND)) == expected


def test_steps_that_were_queued_ahead_are_taken_back_before_anything_else_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ahead(*_: Any) -> Generator[int, None, None]:
        start = engine.position
        try:
            for read in range(5):
                engine.state.advance(1)
                yield 3 + read
        finally:
            engine.state.set_position(start + 1)

    monkeypatch.setattr(engine, "following", ahead)
    run = run_of(engine, FIRST)
    assert list(islice(run, 4))[1:] == [3, 4, 5]
    assert engine.position == 13
    engine.rewind(0)
    assert engine.position == 11
    run.close()
    assert engine.position == 11


def test_an_error_ends_a_run_as_interrupted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Generator[int, None, None]:
        yield 3
        raise FloatingPointError("NaN")

    monkeypatch.setattr(engine, "following", broken)
    with closing(run_of(engine, FIRST)) as run, pytest.raises(FloatingPointError):
        list(run)
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "interrupted"


HARMLESS: dict[str, Callable[[Engine], Any]] = {
    "an id beyond the vocabulary": lambda e: e.generate([3, 89], 4),
    "no new tokens": lambda e: e.generate(SECOND, 0),
    "a prompt beyond the context": lambda e: e.generate([3] * 65, 1),
    "stops that are no ids": lambda e: e.generate(SECOND, 3, GREEDY, "x"),  # type: ignore[arg-type]
    "a prompt to reuse": lambda e: e.generate([89], 3, GREEDY, NO_STOP, reuse=True),
    "logits": lambda e: e.logits([89]),
    "chunks that do not add up": lambda e: e.logits(SECOND, [1]),
    "logits beyond the context": lambda e: e.logits([3] * 65),
    "trace": lambda e: e.trace([89]),
    "a trace beyond the context": lambda e: e.trace([3] * 65),
    "a trace of more tokens": lambda e: e.trace(SECOND, prompt_tokens=99),
    "prompt_logprobs": lambda e: e.prompt_logprobs([89], 0),
    "a scored prompt beyond the context": lambda e: e.prompt_logprobs([3] * 65, 0),
    "prefill": lambda e: e.prefill([89]),
    "decode": lambda e: e.decode([3] * 9),
    "a state in no file": lambda e: e.save_state(None),  # type: ignore[arg-type]
    "a state of no file": lambda e: e.load_state(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", HARMLESS)
def test_a_call_that_is_refused_changes_nothing(what: str, engine: Engine) -> None:
    """Neither the sequence nor a run of it."""
    expected = list(run_of(engine, FIRST))
    with closing(run_of(engine, FIRST)) as run:
        given = [next(run), next(run)]
        sequence = engine.token_ids
        with pytest.raises(ValueError, match="found"):
            HARMLESS[what](engine)
        assert engine.token_ids == sequence
        assert given + list(run) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, use: next(engine.generate(FIRST, 3, GREEDY, NO_STOP, use)),
        lambda engine, use: engine.prefill(FIRST, use),
        lambda engine, use: engine.prompt_logprobs(FIRST, 1, use),
    ],
    ids=["generate", "prefill", "prompt_logprobs"],
)
def test_progress_that_uses_the_engine_is_found_out(
    call: Callable[[Engine, Progress], object], engine: Engine
) -> None:
    def use(done: int, total: int) -> None:
        engine.logits([3] * len(FIRST))

    with pytest.raises(RuntimeError, match="^the engine was used for something else"):
        call(engine, use)
    assert len(list(run_of(engine, FIRST))) == 6


def test_integers_of_numpy_count(engine: Engine) -> None:
    expected = list(run_of(engine, FIRST, 3))
    stops = np.array([], dtype=np.int64)
    assert list(engine.generate(np.array(FIRST), np.int64(3), GREEDY, stops)) == expected  # type: ignore[arg-type]
    engine.rewind(np.int32(1))  # type: ignore[arg-type]
    assert engine.position == 11


REFUSED: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "True tokens": (lambda e: e.generate(FIRST, True), "max_new_tokens: found True, expected an"),
    "text": (lambda e: e.generate(FIRST, "3"), "max_new_tokens: found '3', expected an integer"),  # type: ignore[arg-type]
    "a dictionary": (
        lambda e: e.generate(FIRST, 3, {"temperature": 0}),  # type: ignore[arg-type]
        "sampling: found {'temperature': 0}, expected SamplingParams",
    ),
    "a class": (
        lambda e: e.generate(FIRST, 3, SamplingParams),  # type: ignore[arg-type]
        "sampling: found <class 'dsv4.sampling.SamplingParams'>, expected SamplingParams",
    ),
    "letters": (lambda e: e.generate(FIRST, 3, None, "ab"), "stop_token_ids: found 'ab', expected"),  # type: ignore[arg-type]
    "one stop": (lambda e: e.generate(FIRST, 3, None, 1), "stop_token_ids: found 1, expected int"),  # type: ignore[arg-type]
    "a stop beyond the vocabulary": (
        lambda e: e.generate(FIRST, 3, None, [89]),
        "stop_token_ids: found 89, expected ids from 0 to 88",
    ),
    "a word for a function": (
        lambda e: e.generate(FIRST, 3, prefill_progress="x"),  # type: ignore[arg-type]
        "prefill_progress: found 'x', expected a function or None",
    ),
    "booleans": (lambda e: e.logits([True]), "token_ids: found [True], expected integers"),
    "booleans of torch": (
        lambda e: e.logits(torch.tensor([True])),  # type: ignore[arg-type]
        "token_ids: found tensor([",
    ),
    "a column": (
        lambda e: e.logits(torch.tensor([[5], [6]])),  # type: ignore[arg-type]
        "token_ids: found tensor([[",
    ),
    "bytes": (lambda e: e.logits(b"ab"), "token_ids: found b'ab', expected integers"),
    "bytes that may change": (lambda e: e.decode(bytearray(b"a")), "token_ids: found bytearray("),
    "a mapping": (lambda e: e.prefill({3: "x"}), "token_ids: found {3: 'x'}, expected integers"),  # type: ignore[arg-type]
    "half a token": (lambda e: e.rewind(1.5), "tokens: found 1.5, expected an integer from 0 to 0"),  # type: ignore[arg-type]
    "a word": (lambda e: e.rewind("x"), "tokens: found 'x', expected an integer from 0 to 0"),  # type: ignore[arg-type]
    "a boolean of torch": (
        lambda e: e.rewind(torch.tensor(True)),  # type: ignore[arg-type]
        "tokens: found tensor(True), ",
    ),
    "a prompt that is a boolean": (
        lambda e: e.trace(FIRST, prompt_tokens=False),
        "prompt_tokens: found False, expected an integer from 0 to 10",
    ),
    "a boolean": (
        lambda e: e.rewind(False),
        "tokens: found False, expected an integer from 0 to 0",
    ),
}


@pytest.mark.parametrize(
    ("chunk", "sizes", "fed"), [(4, [8, 9], [8, 8, 1]), (16, [12, 17], [12, 16, 1])]
)
def test_a_step_of_logits_may_have_as_many_tokens_as_a_decode_step_or_a_chunk(
    chunk: int, sizes: list[int], fed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(max_context=64, prefill_chunk=chunk)
    run = engine.steps.run
    lengths: list[int] = []

    def noted(token_ids: Sequence[int]) -> torch.Tensor:
        lengths.append(len(token_ids))
        return run(token_ids)

    monkeypatch.setattr(engine.steps, "run", noted)
    engine.logits(random_ids(sum(sizes)), chunk_sizes=sizes)
    assert lengths == fed


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_in_one_line(what: str, engine: Engine) -> None:
    engine.reset()
    call, message = REFUSED[what]
    with pytest.raises(UserError) as caught:
        call(engine)
    assert str(caught.value).startswith(message)


def test_results_may_be_changed_in_place(engine: Engine) -> None:
    trace = engine.trace(FIRST)
    engine.reset()
    results = [engine.prefill(FIRST), engine.decode([3, 4]), engine.logits(FIRST)]
    for tensor in (*results, *trace.values()):
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.is_inference()
        tensor.zero_()


@pytest.mark.slow
def test_the_default_dtype_of_the_process_changes_nothing() -> None:
    code = """
import torch
from dsv4 import Engine, EngineConfig, SamplingParams
def run():
    engine = Engine.load("dsv4/demo/checkpoint", EngineConfig(device="cpu"))
    tokens = list(engine.generate(list(range(140)), 4, SamplingParams(seed=1), ()))
    return engine.logits(list(range(140))), tokens
logits, tokens = run()
torch.set_default_dtype(torch.float64)
again, same = run()
assert torch.equal(logits, again) and tokens == same
"""
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
