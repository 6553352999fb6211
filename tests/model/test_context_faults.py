"""Reported faults that depend on how long a prompt, a chunk or a buffer is: rows J of
docs/regressions.md.
"""

from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.ops import TORCH
from dsv4.ops.compressor import compress
from tests.model.parts import with_parts
from tests.model.test_cache_faults import Selections
from tests.model.tiny import random_ids, small_config, tiny_engine

BOUND = 5e-6
GREEDY = SamplingParams(temperature=0.0)
CHUNKS = (8, 9, 31, 64, 127, 128, 129, 200)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
def test_spec11_j62_prompts_that_end_beside_the_border_of_a_chunk(chunk: int) -> None:
    """n · chunk − 1, n · chunk and n · chunk + 1 tokens against one pass over all."""
    token_ids = random_ids(3 * chunk + 1)
    whole = tiny_engine().logits(token_ids)
    engine = tiny_engine(prefill_chunk=chunk)
    for passes in (1, 2, 3):
        for count in range(passes * chunk - 1, passes * chunk + 2):
            engine.reset()
            last = engine.prefill(token_ids[:count])
            assert relative_error(last, whole[count - 1]) <= BOUND, count


def chunk_of(entries: set[int], borders: list[int]) -> list[bool]:
    """Whether there are entries of each chunk of tokens, 4 tokens each."""
    return [
        any(start <= 4 * entry < stop for entry in entries) for start, stop in pairwise(borders)
    ]


def forgets_the_first_chunk(kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, *rest: Any):
    """A chunk begins in scratch memory that it shares with the one before."""
    compress(kv_TW, score_TW, positions_T, *rest)
    weights, state = rest
    if weights.rotate_keys and int(positions_T[0]) > 0:
        state.rows.data[: int(positions_T[0]) // 4] = 0


@pytest.mark.parametrize("forgetful", [False, True], ids=["right", "with the fault"])
def test_spec11_j63_index_keys_of_every_chunk_stay(forgetful: bool) -> None:
    """Of three chunks of 40 tokens each one holds what some token of the last one looks for, and
    every token lists what it lists in a single pass.
    """
    raw = small_config((4,), 0)
    token_ids = random_ids(120)
    whole = Selections()
    tiny_engine(raw, ops=whole.ops).logits(token_ids)
    chunked = Selections(with_parts(compress=forgets_the_first_chunk) if forgetful else TORCH)
    tiny_engine(raw, ops=chunked.ops).logits(token_ids, [40, 40, 40])
    assert (chunked.by_token == whole.by_token) is not forgetful
    borders = [0, 40, 80, 120]
    found = [chunk_of(entries, borders) for entries in whole.by_token[80:]]
    assert [sum(column) > 10 for column in zip(*found, strict=True)] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 4])
def test_spec11_j69_a_whole_model_on_contexts_of_up_to_a_list_and_one_entry(topk: int) -> None:
    """Until more entries are visible than a list holds, its length makes no difference."""
    raw = small_config((4, 128), 0, index_topk=topk)
    token_ids = random_ids(4 * (topk + 1) + 3)
    found = tiny_engine(raw).logits(token_ids)
    unlimited = tiny_engine(small_config((4, 128), 0, index_topk=512)).logits(token_ids)
    alike = 4 * (topk + 1) - 1
    assert relative_error(found[:alike], unlimited[:alike]) <= BOUND
    assert relative_error(found[alike:], unlimited[alike:]) > 1e-3
    for count in range(1, len(token_ids) + 1):
        engine = tiny_engine(raw)
        assert relative_error(engine.prefill(token_ids[:count]), found[count - 1]) <= BOUND


@pytest.mark.slow
def test_spec11_j74_logits_do_not_depend_on_the_capacity() -> None:
    """35 entries in as many slots, and in 12,500."""
    token_ids = random_ids(140)
    small, large = (small_config(max_position_embeddings=context) for context in (140, 50_000))
    expected = tiny_engine(small, max_context=140).logits(token_ids)
    found = tiny_engine(large, max_context=50_000).logits(token_ids)
    assert relative_error(found, expected) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_spec11_j95_the_first_tokens_after_the_start(count: int) -> None:
    """Of an engine that has done nothing else: each is the best of the logits before it."""
    prompt = random_ids(6)
    tokens = list(tiny_engine().generate(prompt, count, GREEDY, stop_token_ids=()))
    assert len(tokens) == count
    logits = logits_step_by_step(tiny_engine(), prompt, tokens)
    assert tokens == [int(row.argmax()) for row in logits]


def logits_step_by_step(engine: Engine, prompt: list[int], tokens: list[int]) -> list[Tensor]:
    """Behind the prompt and behind every token but the last."""
    return [engine.prefill(prompt), *(engine.decode([token])[0] for token in tokens[:-1])]
