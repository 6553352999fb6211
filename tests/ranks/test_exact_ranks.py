"""Ranks against a lone one with arithmetic that no cut can change: bit for bit, whatever the steps
are.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.ops.exchange import sum_ranks
from dsv4.step import meeting
from dsv4.step.lock_step import JoinedValues
from tests.model.tiny import random_ids
from tests.ranks.exact import EXACT
from tests.ranks.simulated import RAW, caches, different_caches, ranks_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
IDS = random_ids(200)
DTYPES: dict[str, dict[str, Any]] = {
    "float32, plain rows": {},
    "float32, fp8 rows": {"kv_dtype": "fp8"},
    "bfloat16, fp8 rows": {"compute_dtype": "bfloat16", "kv_dtype": "fp8"},
}


@pytest.fixture(params=DTYPES)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return DTYPES[request.param]


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


def mixed_steps(engine: Engine) -> Tensor:
    """Logits of a chunk, of tokens one by one, of a draft that is taken back in part, and of steps
    behind it. Windows of 4 and of 128 tokens end in all of them.
    """
    rows = [engine.prefill(IDS[:124])[None]]
    rows += [engine.decode([token]) for token in IDS[124:130]]
    rows.append(engine.decode(IDS[150:158]))
    engine.rewind(7)
    rows.append(engine.decode(IDS[131:134]))
    engine.rewind(3)
    rows += [engine.decode([token]) for token in IDS[131:135]]
    return torch.cat(rows)


@pytest.mark.slow
def test_ranks_equal_a_lone_one_bit_for_bit(ranks: int, settings: dict[str, Any]) -> None:
    lone = ranks_engine(1, EXACT, **settings)
    several = ranks_engine(ranks, EXACT, **settings)
    expected = mixed_steps(lone)
    assert not bool(expected.isnan().any())
    assert torch.equal(mixed_steps(several), expected)
    assert different_caches(several, lone) == []
    assert several.position == lone.position


@pytest.mark.slow
def test_a_second_chunk_equals_that_of_a_lone_rank(ranks: int) -> None:
    settings = {"prefill_chunk": 60, "kv_dtype": "fp8"}
    lone, several = (ranks_engine(count, EXACT, **settings) for count in (1, ranks))
    assert torch.equal(several.logits(IDS), lone.logits(IDS))
    assert different_caches(several, lone) == []
    uneven = [1, 60, 9, 8, 59, 63]
    assert torch.equal(several.logits(IDS, uneven), lone.logits(IDS, uneven))
    assert different_caches(several, lone) == []


@pytest.mark.slow
def test_generate_yields_the_tokens_of_a_lone_rank(ranks: int) -> None:
    lone, several = (ranks_engine(count, EXACT, kv_dtype="fp8") for count in (1, ranks))
    for sampling in (GREEDY, SamplingParams(temperature=1.0, seed=5, logprobs=3)):
        expected = list(lone.generate(IDS[:20], 8, sampling, NO_STOP))
        assert list(several.generate(IDS[:20], 8, sampling, NO_STOP)) == expected
    assert different_caches(several, lone) == []


def test_a_generation_that_is_closed_leaves_the_ranks_side_by_side(ranks: int) -> None:
    lone, several = (ranks_engine(count, EXACT) for count in (1, ranks))
    for engine in (lone, several):
        tokens = engine.generate(IDS[:9], 20, GREEDY, NO_STOP)
        for _ in range(3):
            next(tokens)
        tokens.close()
    assert several.position == lone.position
    assert torch.equal(several.decode(IDS[40:42]), lone.decode(IDS[40:42]))
    assert different_caches(several, lone) == []


def test_traced_values_are_whole_and_those_of_a_lone_rank(ranks: int) -> None:
    """Heads of all ranks side by side, logits of the whole vocabulary."""
    lone, several = (ranks_engine(count, EXACT) for count in (1, ranks))
    expected = lone.trace(IDS[:12], prompt_tokens=10)
    found = several.trace(IDS[:12], prompt_tokens=10)
    assert list(found) == list(expected)
    assert found["layers.1.attn.heads"].shape[1] == RAW["num_attention_heads"]
    assert found["logits"].shape[1] == RAW["vocab_size"]
    different = [name for name, rows in expected.items() if not torch.equal(found[name], rows)]
    assert different == []


@pytest.mark.parametrize("fault", ["a rank left out", "a rank twice", "the other way round"])
def test_a_wrong_sum_does_not_equal_a_lone_rank(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would see. Another order is none: the sums are exact."""

    def wrong(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        changed = {
            "a rank left out": parts[1:],
            "a rank twice": [*parts, parts[-1]],
            "the other way round": parts[::-1],
        }
        return sum_ranks(changed[fault], dtype)

    expected = ranks_engine(1, EXACT).logits(IDS[:10])
    monkeypatch.setattr(meeting, "sum_ranks", wrong)
    same = torch.equal(ranks_engine(2, EXACT).logits(IDS[:10]), expected)
    assert same is (fault == "the other way round")


def test_ordinary_sums_differ_by_their_rounding_alone(ranks: int) -> None:
    """The torch ops add in float32: another order, within a few last places of the logits."""
    lone, several = (ranks_engine(count) for count in (1, ranks))
    expected = lone.logits(IDS[:30])
    torch.testing.assert_close(several.logits(IDS[:30]), expected, rtol=0, atol=1e-4)
    for rank in range(ranks):
        own, first = caches(several, rank), caches(several, 0)
        assert all(torch.equal(rows, first[name]) for name, rows in own.items())


def test_every_rank_has_bits_of_its_own_weights_only() -> None:
    """Ranks whose parts are exchanged give other logits: a rank is not known by its weights."""
    lone = ranks_engine(1, EXACT).logits(IDS[:10])
    several = ranks_engine(2, EXACT)
    first, second = several.steps.model, several.models[1]
    blocks = [
        replace(mine, ffn=replace(mine.ffn, shared=theirs.ffn.shared))
        for mine, theirs in zip(first.blocks, second.blocks, strict=True)
    ]
    segment = replace(first.segments[0], blocks=tuple(blocks))
    models = replace(first, segments=(segment,)), second
    several.steps.models = models  # pyright: ignore[reportAttributeAccessIssue]
    assert not torch.equal(several.logits(IDS[:10]), lone)


def test_values_are_shown_in_the_order_of_rank_0() -> None:
    """Whoever comes first: what follows heads that are not complete waits for them."""
    shown: list[tuple[str, int]] = []
    joined = JoinedValues(lambda name, rows: shown.append((name, rows.shape[1])), 2)
    first, second = joined.of(0), joined.of(1)
    heads, whole = torch.zeros(1, 3), torch.zeros(1, 7)
    second("layers.0.attn.q", heads)
    second("layers.0.attn.kv", whole)
    assert shown == []
    first("layers.0.attn.q", heads)
    first("layers.0.attn.kv", whole)
    first("layers.0.attn.heads", heads)
    first("hidden", whole)
    assert shown == [("layers.0.attn.q", 6), ("layers.0.attn.kv", 7)]
    second("layers.0.attn.heads", heads)
    assert shown[2:] == [("layers.0.attn.heads", 6), ("hidden", 7)]


class Parts:
    """An observer that notes the parts of steps."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin_step(self) -> None:
        self.names.append("step")

    @contextmanager
    def part(self, name: str, device: torch.device, layer: int | None) -> Iterator[None]:
        self.names.append(name)
        yield

    def item(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def hand_off(self, source: torch.device, target: torch.device) -> AbstractContextManager[None]:
        return nullcontext()


def test_of_several_ranks_the_first_one_is_watched() -> None:
    watched = []
    for ranks in (1, 2):
        engine = ranks_engine(ranks, EXACT)
        parts = Parts()
        engine.steps.observer = parts
        engine.prefill(IDS[:5])
        engine.decode(IDS[5:6])
        watched.append(parts.names)
    assert watched[0] == watched[1]
    assert watched[0].count("step") == 2
