"""Known faults of caches and compressor state: rows B, C22 and H48 of docs/regressions.md.

What is right holds, and a fault is seen.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.ops import TORCH, Ops
from dsv4.ops.compressor import compress
from dsv4.ops.kv_write import kv_write
from tests.model.conftest import PARITY_BOUND, SavedOracle
from tests.model.parts import with_parts
from tests.model.tiny import random_ids, small_config, tiny_engine

pytestmark = pytest.mark.slow

BOUND = 5e-6
CSA_AND_HCA = small_config((4, 128), 0)


def chunking_error(engine: Engine, token_ids: list[int], sizes: list[int]) -> float:
    """Relative difference of the logits between feeding ``sizes`` and everything at once."""
    whole = engine.logits(token_ids)
    return float((engine.logits(token_ids, sizes) - whole).abs().max() / whole.abs().max())


def test_spec11_b06_a_wrong_length_shows_from_the_fourth_token_on(
    saved_oracle: SavedOracle,
) -> None:
    def one_short(
        kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: Any, state: Any
    ) -> None:
        compress(kv_TW[:-1], score_TW[:-1], positions_T[:-1], weights, state)

    # Prompts whose last token completes a window; the fault hides at every other length.
    for count, correct in (
        (3, True),
        (4, False),
        (5, True),
        (7, True),
        (8, False),
        (127, True),
        (128, False),
    ):
        assert saved_oracle.errors(count=count)[-1] <= PARITY_BOUND
        assert (
            saved_oracle.errors(with_parts(compress=one_short), count)[-1] <= PARITY_BOUND
        ) is correct, count


def test_spec11_b07_tokens_inside_a_window_must_not_write_slot_0() -> None:
    def clamped_sentinel(
        kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: Any, state: Any
    ) -> None:
        compress(kv_TW, score_TW, positions_T, weights, state)
        if (int(positions_T[-1]) + 1) % weights.ratio:
            state.rows.write(torch.zeros(1, dtype=torch.int64), torch.zeros(1, state.rows.width))

    token_ids = random_ids(30)
    sizes = [20, *[1] * 10]
    assert chunking_error(tiny_engine(CSA_AND_HCA), token_ids, sizes) <= BOUND
    assert (
        chunking_error(
            tiny_engine(CSA_AND_HCA, ops=with_parts(compress=clamped_sentinel)), token_ids, sizes
        )
        > 1e-3
    )


@pytest.mark.slow
def test_spec11_b08_prefill_and_decode_agree_for_every_length_mod_128() -> None:
    engine = tiny_engine(CSA_AND_HCA)
    token_ids = random_ids(130)
    whole = engine.logits(token_ids)
    for count in range(1, 129):
        engine.reset()
        found = torch.stack(
            (engine.prefill(token_ids[:count]), engine.decode([token_ids[count]])[0])
        )
        assert (
            float((found - whole[count - 1 : count + 1]).abs().max() / whole.abs().max()) <= BOUND
        ), count


class Selections:
    """An op table that remembers what every token of the first CSA layer selected."""

    def __init__(self, ops: Ops = TORCH) -> None:
        self.by_token: list[set[int]] = []
        self._select = ops.index_select
        self.ops = dataclasses.replace(ops, index_select=self._remember)

    def _remember(self, *arguments: Any) -> Tensor:
        selected_TK = self._select(*arguments)
        self.by_token += [{entry for entry in row if entry >= 0} for row in selected_TK.tolist()]
        return selected_TK


def test_spec11_b09_entries_of_earlier_chunks_stay_selectable() -> None:
    token_ids = random_ids(160)
    raw = small_config((4,), 0)
    whole = Selections()
    chunked = Selections()
    tiny_engine(raw, ops=whole.ops).logits(token_ids)
    tiny_engine(raw, ops=chunked.ops).logits(token_ids, [32] * 5)
    assert chunked.by_token == whole.by_token
    first_chunk = set(range(8))
    assert sum(bool(selected & first_chunk) for selected in chunked.by_token[128:]) > 16


def test_spec11_b09_a_pool_of_the_current_chunk_only_is_noticed() -> None:
    def current_chunk(
        q: Tensor, weight: Tensor, scale: float, keys: Any, positions_T: Tensor, topk: int
    ) -> Tensor:
        selected_TK = TORCH.index_select(q, weight, scale, keys, positions_T, topk)
        return torch.where(selected_TK < positions_T[0] // 4, -1, selected_TK)

    engine = tiny_engine(
        small_config((4,), 0), ops=dataclasses.replace(TORCH, index_select=current_chunk)
    )
    assert chunking_error(engine, random_ids(160), [32] * 5) > 1e-3


def test_spec11_b11_host_and_device_agree_on_the_position() -> None:
    # A cache of N tokens with the ring at N + 1 repeats a token, which reads as a fluent loop.
    engine = tiny_engine()
    steps = (
        lambda: engine.prefill(random_ids(133)),
        lambda: engine.decode(random_ids(8)),
        lambda: engine.rewind(5),
    )
    for step, expected in zip(steps, (133, 141, 136), strict=True):
        step()
        assert engine.position == expected
        assert [int(position_1) for position_1 in engine.state.positions_1.values()] == [expected]


def test_spec11_b11_a_ring_that_is_one_ahead_is_noticed() -> None:
    token_ids = random_ids(20)
    engine = tiny_engine(CSA_AND_HCA)
    expected = engine.logits(token_ids)[-1]
    engine.reset()
    engine.prefill(token_ids[:-1])
    engine.state.set_position(len(token_ids))
    assert float((engine.decode(token_ids[-1:])[0] - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("shared", [1, 4, 130, 150, 151, 153])
def test_spec11_b12_a_shared_prefix_is_not_served_from_a_stale_ring(shared: int) -> None:
    # The sequence before has the same beginning, is longer, and has left its window and its open
    # windows behind.
    engine = tiny_engine()
    prefix = random_ids(shared)
    ours = prefix + random_ids(9, seed=1)
    other = prefix + random_ids(60, seed=2)
    expected = tiny_engine().logits(ours)
    engine.logits(other)
    assert torch.equal(engine.logits(ours), expected)


def test_spec11_b13_decode_that_reuses_the_slots_of_the_prefill_is_noticed() -> None:
    first: list[Tensor] = []

    def stale_slots(
        kv: Tensor, norm: Any, positions_T: Tensor, inv_freq: Any, ring: Any, eps: Any
    ) -> None:
        first.append(positions_T)
        kv_write(kv, norm, first[0][: kv.shape[0]], inv_freq, ring, eps)

    token_ids = random_ids(24)
    sizes = [20, 1, 1, 2]
    assert chunking_error(tiny_engine(), token_ids, sizes) <= BOUND
    assert (
        chunking_error(tiny_engine(ops=with_parts(kv_write=stale_slots)), token_ids, sizes) > 1e-3
    )


def test_spec11_c22_all_four_prompt_lengths_mod_4_select_alike(saved_oracle: SavedOracle) -> None:
    # An entry becomes visible with the last token of its window. Off by one, a quarter of all
    # lengths is wrong.
    def one_late(
        q: Tensor, weight: Tensor, scale: float, keys: Any, positions_T: Tensor, topk: int
    ) -> Tensor:
        return TORCH.index_select(q, weight, scale, keys, positions_T - 1, topk)

    late = dataclasses.replace(TORCH, index_select=one_late)
    for count in range(145, 149):
        assert saved_oracle.errors(count=count)[-1] <= PARITY_BOUND
        wrong_if_last_of_window = saved_oracle.errors(late, count)[-1]
        if count % 4 == 0:
            assert wrong_if_last_of_window > 10 * PARITY_BOUND


def test_lesson_09_decoding_without_the_previous_window_is_noticed() -> None:
    def open_window_only(
        kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: Any, state: Any
    ) -> None:
        start = int(positions_T[0])
        previous = torch.arange(max(start // 4 * 4 - 4, 0), start // 4 * 4) % state.ring.kv.shape[0]
        if weights.ratio == 4:
            state.ring.score[previous] = -torch.inf
        compress(kv_TW, score_TW, positions_T, weights, state)

    token_ids = random_ids(24)
    sizes = [8, *[1] * 16]
    assert chunking_error(tiny_engine(CSA_AND_HCA), token_ids, sizes) <= BOUND
    engine = tiny_engine(CSA_AND_HCA, ops=with_parts(compress=open_window_only))
    assert chunking_error(engine, token_ids, sizes) > 1e-3


def rejected_draft_error(engine: Engine, start: int, draft: int) -> float:
    """Relative error of 8 tokens decoded after a rejected draft, against never having drafted."""
    token_ids = random_ids(start + 8)
    whole = engine.logits(token_ids)
    engine.reset()
    engine.prefill(token_ids[:start])
    engine.decode(random_ids(draft, seed=5))
    engine.rewind(draft)
    found = torch.cat([engine.decode([token]) for token in token_ids[start:]])
    return float((found - whole[start:]).abs().max() / whole.abs().max())


@pytest.mark.parametrize("start", [4, 5, 6, 7, 126, 127, 128])
def test_spec11_h48_a_rejected_draft_at_every_residue_mod_4_and_around_128(start: int) -> None:
    engine = tiny_engine(CSA_AND_HCA)
    for draft in (1, 4, 8):
        assert rejected_draft_error(engine, start, draft) <= BOUND


def test_spec11_h48_a_ring_that_appends_instead_of_addressing_by_position_is_noticed() -> None:
    def appending(
        kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: Any, state: Any
    ) -> None:
        # Without the draft's room the history of the open window is gone after a rejection.
        compress(kv_TW, score_TW, positions_T, weights, state)
        behind = (positions_T[-1] + 1 - torch.arange(9, 17)) % state.ring.kv.shape[0]
        state.ring.kv[behind] = 0.0

    assert (
        rejected_draft_error(tiny_engine(CSA_AND_HCA, ops=with_parts(compress=appending)), 26, 8)
        > 1e-3
    )
