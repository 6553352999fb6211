"""What a step is refused for, and which token a fault is of."""

import math
from collections.abc import Generator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import pytest
import torch

from dsv4 import Engine
from dsv4.layers.values import Watch
from tests.model.tiny import random_ids, tiny_engine

PROMPT = random_ids(6)


@pytest.fixture
def engine() -> Engine:
    engine = tiny_engine(max_context=256, prefill_chunk=256)
    engine.prefill(PROMPT)
    return engine


@pytest.mark.parametrize("row", [[0.0, -math.inf], [-math.inf, 1e38]])
def test_tokens_that_cannot_follow_are_no_fault(engine: Engine, row: list[float]) -> None:
    logits_TV = torch.tensor([[0.0, 1.0], row])
    assert engine._nan.checked(logits_TV, PROMPT) is logits_TV


@pytest.mark.parametrize("faulty", [[-math.inf] * 2, [0.0, math.inf], [0.0, math.nan]])
@pytest.mark.parametrize("place", [0, 1])
def test_every_row_has_a_token_that_can_follow(
    engine: Engine, faulty: list[float], place: int
) -> None:
    rows = [[0.0, 1.0], [0.0, 1.0]]
    rows[place] = faulty
    with pytest.raises(FloatingPointError, match="^NaN or infinity after 6 tokens$"):
        engine._nan.checked(torch.tensor(rows), PROMPT)
    assert engine.position == 0


def test_a_run_that_is_closed_is_closed_at_once(engine: Engine) -> None:
    """Not when the collector comes to it: somebody may still look at it."""

    def counting() -> Generator[int, None, None]:
        yield from range(9)

    tokens = counting()
    watched = engine._nan.watched(PROMPT, tokens)
    assert next(watched) == 0
    watched.close()
    assert getgeneratorstate(tokens) == GEN_CLOSED


@pytest.mark.parametrize(
    ("first", "second", "what"), [(math.nan, math.inf, "NaN"), (math.inf, math.nan, "infinity")]
)
def test_a_fault_far_inside_a_chunk_is_named_by_its_token(
    engine: Engine, first: float, second: float, what: str
) -> None:
    prompt = [token % 80 for token in random_ids(200)]
    prompt[195] = 87
    prompt[197] = 88
    table: Any = engine.model.embed.table_VE
    table[87:, 0] = torch.tensor([first, second])
    with pytest.raises(FloatingPointError, match=f"^{what} in .*streams at position 195$"):
        next(engine.generate(prompt, 4))


def test_nothing_is_traced_behind_the_piece_with_the_first_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    traced = engine.steps.traced

    def counted(watch: Watch) -> Any:
        run = traced(watch)

        def counting(token_ids: list[int]) -> torch.Tensor:
            ran.extend(token_ids)
            return run(token_ids)

        return counting

    monkeypatch.setattr(engine.steps, "traced", counted)
    table: Any = engine.model.embed.table_VE
    table[88] = math.nan
    prompt = [token % 80 for token in random_ids(200)]
    prompt[70] = 88
    with pytest.raises(FloatingPointError, match="at position 70$"):
        next(engine.generate(prompt, 4))
    assert 70 < len(ran) < 200


def test_a_compressed_entry_is_named_by_the_token_that_completes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entry 27 of 4 tokens each, in a chunk that begins inside the entry 24."""
    engine = tiny_engine(max_context=256, prefill_chunk=99)
    state = engine.state

    def traced(watch: Watch) -> Any:
        def run(token_ids: list[int]) -> torch.Tensor:
            entries = torch.zeros(len(token_ids) // 4, 2)
            assert state.position == 99
            entries[3, 0] = math.nan
            watch.seen("layers.1.attn.compressed", entries)
            state.advance(len(token_ids))
            return torch.zeros(len(token_ids), engine.config.hidden_size)

        return run

    monkeypatch.setattr(engine.steps, "traced", traced)
    place = "layers.1.attn.compressed at position 111"
    with pytest.raises(FloatingPointError, match=f"^NaN in {place}$"):
        engine._nan.checked(torch.tensor([math.nan]), random_ids(150))


def test_of_logits_only_those_of_the_last_token_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has asked for the others, though a traced step may look the same."""
    logits = engine.steps.logits

    def infinite(hidden_TE: torch.Tensor) -> torch.Tensor:
        return logits(hidden_TE) + math.inf

    monkeypatch.setattr(engine.steps, "logits", infinite)
    engine.reset()
    with pytest.raises(FloatingPointError, match="^infinity in logits at position 191$"):
        engine.prefill([5] * 192)


def test_where_no_memory_is_left_for_a_traced_step_the_error_has_no_name(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(_watch: object) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine.steps, "traced", traced)
    with pytest.raises(FloatingPointError, match="^NaN or infinity after 6 tokens$"):
        engine._nan.checked(torch.tensor([math.nan]), PROMPT)
    assert engine.position == 0
