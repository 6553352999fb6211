"""However a sequence is fed, in one piece, in chunks, token by token or in steps of up to 8, its
logits are the same.

With one matrix product per token (``token_by_token``) the same means the same bits, in every dtype
of the caches. With the normal ops, products of different heights round differently: float32 logits
agree to 5e-6 of their largest value (measured: 1e-6).
"""

from typing import Any

import pytest
import torch

from dsv4 import Engine
from dsv4.ops.compressor import compress
from tests.model.parts import with_parts
from tests.model.tiny import random_ids, small_config, tiny_engine
from tests.model.token_by_token import one_token_at_a_time

pytestmark = pytest.mark.slow

FLOAT32_BOUND = 5e-6
WHOLE = 4096
# Every ratio once, hash and learned routing; from 36 tokens on the indexer leaves entries out.
THREE_LAYERS = small_config((4, 128, 0), 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "fp8 rows, bfloat16": {"kv_dtype": "fp8", "compute_dtype": "bfloat16"},
    "plain rows, float32": {"kv_dtype": "bf16", "compute_dtype": "float32"},
}
LENGTHS = (*range(1, 10), *range(126, 131), *range(254, 259), *range(511, 514))


def equal_steps(count: int, step: int) -> list[int]:
    """Chunk sizes ``step``, ``step``, ..., rest."""
    return [min(step, count - start) for start in range(0, count, step)]


def mixed_steps(count: int) -> list[int]:
    """All sizes 1 to 8 again and again, in an order that meets boundaries of 4 and 128 at every
    phase.
    """
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes += [3, 1, 8, 2, 5, 7, 4, 6, 1]
    sizes = sizes[
        : next(index for index in range(len(sizes)) if sum(sizes[: index + 1]) >= count) + 1
    ]
    return [*sizes[:-1], count - sum(sizes[:-1])]


def bitwise_engine(**settings: Any) -> Engine:
    return tiny_engine(THREE_LAYERS, ops=one_token_at_a_time(), prefill_chunk=WHOLE, **settings)


@pytest.mark.parametrize(
    "settings", ["fp8 rows, bfloat16", pytest.param("plain rows, float32", marks=pytest.mark.slow)]
)
def test_chunked_equals_whole_bit_by_bit(settings: str) -> None:
    engine = bitwise_engine(**SETTINGS[settings])
    token_ids = random_ids(140)
    whole = engine.logits(token_ids)
    for sizes in ([137, 3], mixed_steps(140)):
        assert torch.equal(engine.logits(token_ids, sizes), whole), sizes


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["fp8 rows, bfloat16", "plain rows, float32"])
def test_a_ring_sized_for_the_chunk_gives_the_same_bits(settings: str) -> None:
    # prefill_chunk decides how many slots the window ring has, so every chunk size wraps it
    # elsewhere.
    token_ids = random_ids(270)
    whole = bitwise_engine(**SETTINGS[settings]).logits(token_ids)
    for chunk in (7, 64, 128):
        chunked = tiny_engine(
            THREE_LAYERS, ops=one_token_at_a_time(), prefill_chunk=chunk, **SETTINGS[settings]
        )
        assert torch.equal(chunked.logits(token_ids), whole), chunk


@pytest.mark.slow
def test_decoding_one_and_eight_at_a_time_equals_whole_bit_by_bit() -> None:
    engine = bitwise_engine(**SETTINGS["fp8 rows, bfloat16"])
    token_ids = random_ids(262)
    whole = engine.logits(token_ids)
    for step in (1, 8):
        assert torch.equal(engine.logits(token_ids, equal_steps(262, step)), whole), step


@pytest.mark.parametrize("index_topk", [1, 8, 32])
def test_float32_chunks_agree_while_entries_pass_index_topk(index_topk: int) -> None:
    # 33 entries from token 132 on: selection of 32 starts to leave one out.
    engine = tiny_engine(small_config(index_topk=index_topk), prefill_chunk=WHOLE)
    token_ids = random_ids(140)
    whole = engine.logits(token_ids)
    for sizes in (
        equal_steps(140, 7),
        equal_steps(140, 64),
        [131, 1, 8],
        [1] * 10 + [120] + [2] * 5,
    ):
        assert_close(engine.logits(token_ids, sizes), whole, str(sizes))


def test_the_smallest_ring_holds_a_chunk_and_its_window() -> None:
    token_ids = random_ids(300)
    whole = tiny_engine(THREE_LAYERS, prefill_chunk=WHOLE).logits(token_ids)
    for chunk in (8, 100):
        assert_close(
            tiny_engine(THREE_LAYERS, prefill_chunk=chunk).logits(token_ids),
            whole,
            f"chunk {chunk}",
        )


@pytest.mark.slow
def test_every_length_and_chunking_of_the_regression_matrix() -> None:
    token_ids = random_ids(513)
    engines = {chunk: tiny_engine(prefill_chunk=chunk) for chunk in (7, 64, WHOLE)}
    reference = tiny_engine(prefill_chunk=1).logits(token_ids)
    for chunk, engine in engines.items():
        for length in LENGTHS:
            assert_close(
                engine.logits(token_ids[:length]),
                reference[:length],
                f"length {length}, chunk {chunk}",
            )


@pytest.mark.slow
def test_chunks_around_2048_tokens() -> None:
    raw = small_config((4, 128), 0, index_topk=512)
    token_ids = random_ids(2060)
    whole = tiny_engine(raw, prefill_chunk=WHOLE, max_context=2060).logits(token_ids)
    engine = tiny_engine(raw, prefill_chunk=512, max_context=2060)
    for sizes in (
        equal_steps(2060, 512),
        equal_steps(2060, 64),
        [*equal_steps(2045, 512), *([1] * 7), 8],
    ):
        assert_close(engine.logits(token_ids, sizes), whole, str(sizes))


@pytest.mark.parametrize("count", [*range(1, 10), *range(125, 131)])
def test_prefill_then_decode_equals_a_longer_prefill(count: int) -> None:
    engine = tiny_engine(prefill_chunk=WHOLE)
    token_ids = random_ids(count + 8)
    whole = engine.logits(token_ids)
    for step in (1, 3, 8):
        engine.reset()
        assert_close(engine.prefill(token_ids[:count]), whole[count - 1], f"prefill {count}")
        assert_close(
            engine.decode(token_ids[count : count + step]),
            whole[count : count + step],
            f"step {step}",
        )


@pytest.mark.slow
@pytest.mark.parametrize("count", [*range(1, 10), *range(124, 134), *range(254, 258), 511, 512])
def test_prefill_then_every_decode_step_equals_a_longer_prefill(count: int) -> None:
    engine = tiny_engine(prefill_chunk=WHOLE)
    token_ids = random_ids(count + 9)
    whole = engine.logits(token_ids)
    for step in range(1, 9):
        engine.reset()
        engine.prefill(token_ids[:count])
        after = torch.cat(
            (
                engine.decode(token_ids[count : count + step]),
                engine.decode([token_ids[count + step]]),
            )
        )
        assert_close(after, whole[count : count + step + 1], f"step {step}")


@pytest.mark.parametrize("forgotten", ["kv", "score"])
def test_a_compressor_that_forgets_the_previous_chunk_is_noticed(forgotten: str) -> None:
    def forgetful(
        kv_TW: torch.Tensor, score_TW: torch.Tensor, positions_T: torch.Tensor, *rest: Any
    ) -> None:
        rest[1].ring.__dict__[forgotten].zero_()
        compress(kv_TW, score_TW, positions_T, *rest)

    engine = tiny_engine(ops=with_parts(compress=forgetful), prefill_chunk=WHOLE)
    token_ids = random_ids(64)
    error = (engine.logits(token_ids, equal_steps(64, 7)) - engine.logits(token_ids)).abs().max()
    assert error > 1e-3


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= FLOAT32_BOUND, f"{what}: relative error {error:.1e}"
