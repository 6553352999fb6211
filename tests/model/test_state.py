"""What persists between steps: nothing of a rejected draft or of an earlier sequence, and no memory
that grows.
"""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.caches.allocation import layer_state_bytes
from dsv4.caches.layer import CompressedState
from dsv4.caches.rows import RowCache
from dsv4.ops import TORCH
from tests.model.tiny import random_ids, small_config, tiny_engine
from tests.model.token_by_token import one_token_at_a_time

pytestmark = pytest.mark.slow

THREE_LAYERS = small_config((4, 128, 0), 1)
DEFAULT_DTYPES: dict[str, Any] = {"kv_dtype": "fp8", "compute_dtype": "bfloat16"}


def bitwise_engine(**settings: Any) -> Engine:
    return tiny_engine(THREE_LAYERS, ops=one_token_at_a_time(), **{**DEFAULT_DTYPES, **settings})


def buffers(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the decode state except the position."""
    for index, layer in enumerate(engine.state.layers):
        yield from row_buffers(f"layer {index} ring", layer.keys.ring)
        for name, part in (("compressed", layer.compressed), ("index", layer.index)):
            if part is not None:
                yield from compressed_buffers(f"layer {index} {name}", part)


def row_buffers(name: str, cache: RowCache) -> Iterator[tuple[str, Tensor]]:
    yield f"{name} data", cache.data
    if cache.block_scale is not None:
        yield f"{name} block_scale", cache.block_scale


def compressed_buffers(name: str, part: CompressedState) -> Iterator[tuple[str, Tensor]]:
    yield from row_buffers(name, part.rows)
    yield f"{name} ring kv", part.ring.kv
    yield f"{name} ring score", part.ring.score


def poison(engine: Engine) -> None:
    """NaN everywhere: 0xFF bytes are NaN in E4M3, in E8M0, in bfloat16 and in float32."""
    for _, buffer in buffers(engine):
        buffer.view(torch.uint8).fill_(0xFF)


@pytest.mark.parametrize("settings", [DEFAULT_DTYPES, {}], ids=["fp8", "plain float32"])
def test_a_reset_sequence_cannot_see_what_the_buffers_held(settings: dict[str, Any]) -> None:
    token_ids = random_ids(140)
    for sizes in ([140], [1, 2, 1, 5, 119, 8, 1, 3]):
        fresh = tiny_engine(**settings).logits(token_ids, sizes)
        used = tiny_engine(**settings)
        poison(used)
        assert torch.equal(used.logits(token_ids, sizes), fresh)


@pytest.mark.parametrize("before", [1, 2, 3, 5, 131, 300])
def test_a_sequence_after_a_short_or_long_one_equals_a_fresh_one(before: int) -> None:
    token_ids = random_ids(36)
    used = tiny_engine()
    fresh = used.logits(token_ids, [3, 1, 1, 7, 24])
    used.logits(random_ids(before, seed=7))
    assert torch.equal(used.logits(token_ids, [3, 1, 1, 7, 24]), fresh)


def test_twenty_sequences_of_all_lengths_leave_no_trace() -> None:
    engine = tiny_engine(**DEFAULT_DTYPES)
    token_ids = random_ids(12)
    fresh = engine.logits(token_ids)
    for sequence in range(20):
        engine.reset()
        engine.prefill(random_ids(1 + sequence * 7, seed=sequence))
        engine.decode(random_ids(1 + sequence % 8, seed=sequence))
        assert torch.equal(engine.logits(token_ids), fresh)


SLOW_STARTS = [
    pytest.param(start, marks=pytest.mark.slow)
    for start in (1, 2, 4, 5, 6, 7, 8, 125, 126, 128, 256)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", [3, 127, *SLOW_STARTS])
def test_rejected_drafts_leave_no_trace(start: int) -> None:
    # Every length of draft and of its accepted part, at consecutive positions, against a run that
    # never drafted.
    engine = bitwise_engine()
    token_ids = random_ids(start + 12)
    expected = engine.logits(token_ids)
    engine.reset()
    engine.prefill(token_ids[:start])
    wrong = [token + 1 for token in random_ids(8, 88, seed=3)]
    for step in range(8):
        position = start + step
        for length, accepted in ((8, 0), (step + 1, 0), (8 - step, (8 - step) // 2)):
            draft = [*token_ids[position : position + accepted], *wrong[accepted:length]][:length]
            logits = engine.decode(draft)
            assert torch.equal(logits[:accepted], expected[position : position + accepted])
            engine.rewind(length)
        assert torch.equal(engine.decode([token_ids[position]])[0], expected[position])


@pytest.mark.slow
def test_partly_accepted_drafts_equal_plain_decoding() -> None:
    engine = bitwise_engine()
    token_ids = random_ids(150)
    expected = engine.logits(token_ids)
    engine.reset()
    engine.prefill(token_ids[:118])
    while engine.position < 140:
        accepted = engine.position % 5 % 4 + 1
        true = token_ids[engine.position : engine.position + accepted]
        logits = engine.decode([*true, *random_ids(8 - accepted, seed=engine.position)])
        engine.rewind(8 - accepted)
        assert torch.equal(
            logits[:accepted], expected[engine.position - accepted : engine.position]
        )


@pytest.mark.parametrize("start", [30, 126, 131])
@pytest.mark.parametrize("chunk", [8, 512], ids=["smallest ring", "larger ring"])
def test_what_was_queued_in_vain_and_a_draft_behind_it_are_taken_back(
    start: int, chunk: int
) -> None:
    """A stop leaves three steps behind the last token: eleven tokens are forgotten, across windows
    of 4 and 128. In the smallest ring (128 + 8 + 8 slots) they lie where the oldest keys did.
    """
    engine = bitwise_engine(prefill_chunk=chunk)
    token_ids = random_ids(start + 14)
    expected = engine.logits(token_ids)
    engine.reset()
    engine.prefill(token_ids[:start])
    engine.decode(random_ids(8, seed=1))
    engine.decode(random_ids(3, seed=2))
    engine.rewind(3)
    engine.rewind(8)
    assert torch.equal(engine.decode(token_ids[start : start + 6]), expected[start : start + 6])
    assert torch.equal(engine.decode(token_ids[start + 6 :]), expected[start + 6 :])


def test_rewinding_further_than_the_rings_remember_is_refused() -> None:
    engine = tiny_engine()
    engine.prefill(random_ids(30))
    for tokens in (-1, 9):
        with pytest.raises(ValueError, match="from 0 to 8"):
            engine.rewind(tokens)
    engine.rewind(5)
    with pytest.raises(ValueError, match="from 0 to 6"):
        engine.rewind(7)
    engine.decode(random_ids(2))
    with pytest.raises(ValueError, match="from 0 to 8"):
        engine.rewind(9)
    engine.reset()
    engine.prefill(random_ids(3))
    with pytest.raises(ValueError, match="from 0 to 3"):
        engine.rewind(4)
    engine.rewind(3)
    assert engine.position == 0


@pytest.mark.parametrize("settings", [DEFAULT_DTYPES, {}], ids=["fp8", "plain float32"])
def test_buffers_stay_where_they_were_allocated(settings: dict[str, Any]) -> None:
    engine = tiny_engine(**settings)
    places = {name: buffer.data_ptr() for name, buffer in buffers(engine)}
    position = {
        device: position_1.data_ptr() for device, position_1 in engine.state.positions_1.items()
    }
    list(engine.generate(random_ids(140), 6, stop_token_ids=frozenset()))
    engine.rewind(2)
    engine.logits(random_ids(9))
    assert {name: buffer.data_ptr() for name, buffer in buffers(engine)} == places
    assert {
        device: position_1.data_ptr() for device, position_1 in engine.state.positions_1.items()
    } == position


@pytest.mark.parametrize("settings", [DEFAULT_DTYPES, {}], ids=["fp8", "plain float32"])
def test_the_plan_counts_every_buffer_of_a_layer(settings: dict[str, Any]) -> None:
    engine = tiny_engine(max_context=777, **settings)
    by_layer = [0] * engine.config.num_hidden_layers
    for name, buffer in buffers(engine):
        by_layer[int(name.split()[1])] += buffer.nbytes
    planned = [
        layer_state_bytes(engine.config, engine.engine_config, engine.max_context, ratio)
        for ratio in engine.config.compress_ratios
    ]
    assert by_layer == planned


def test_fp8_rows_take_the_specified_bytes() -> None:
    # model.md#cache-rows: 584 bytes for a row of 512 with 64 rotary values, 132 for an index row of
    # 128.
    raw = small_config((4,), 0, head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    engine = tiny_engine(raw, max_context=400, prefill_chunk=8, kv_dtype="fp8", index_dtype="fp8")
    (layer,) = engine.state.layers
    assert layer.compressed is not None
    assert layer.index is not None
    assert layer.keys.ring.nbytes == 584 * (128 + 8 + 8)
    assert layer.compressed.rows.nbytes == 584 * 101
    assert layer.index.rows.nbytes == 132 * 101


def test_decoding_does_not_collect_tensors() -> None:
    engine = tiny_engine(**DEFAULT_DTYPES)
    engine.prefill(random_ids(20))
    engine.decode(random_ids(1))
    before = live_tensors()
    for token in random_ids(50):
        engine.decode([token])
    assert live_tensors() == before


def live_tensors() -> tuple[int, int]:
    """Number and bytes of the tensors Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


def test_index_dtype_follows_kv_dtype_unless_given() -> None:
    def index_bytes(**settings: Any) -> int:
        layers = tiny_engine(**settings).state.layers
        return sum(layer.index.rows.nbytes for layer in layers if layer.index is not None)

    assert index_bytes(kv_dtype="bf16") == index_bytes(kv_dtype="fp8", index_dtype="bf16")
    assert index_bytes(kv_dtype="fp8") == index_bytes(kv_dtype="bf16", index_dtype="fp8")
    assert index_bytes(kv_dtype="fp8") < index_bytes(kv_dtype="bf16")
    assert EngineConfig().kv_dtype == "fp8"


def test_a_ring_without_room_for_the_draft_is_noticed() -> None:
    # The compressor ring keeps the 8 tokens of a draft beside the history; with the history alone a
    # rejected draft has overwritten tokens that the next entry still needs.
    engine = tiny_engine()
    token_ids = random_ids(40)
    expected = engine.logits(token_ids)
    layers = []
    for layer in engine.state.layers:
        if layer.index is None or layer.compressed is None:
            layers.append(layer)
            continue
        short = dataclasses.replace(layer.compressed.ring, kv=layer.compressed.ring.kv[:8].clone())
        short = dataclasses.replace(short, score=layer.compressed.ring.score[:8].clone())
        layers.append(
            dataclasses.replace(layer, compressed=dataclasses.replace(layer.compressed, ring=short))
        )
    engine.state = dataclasses.replace(engine.state, layers=tuple(layers))
    engine.steps.state = engine.state
    engine.reset()
    engine.prefill(token_ids[:26])
    engine.decode(random_ids(8, seed=1))
    engine.rewind(8)
    assert not torch.allclose(engine.decode(token_ids[26:34]), expected[26:34], atol=1e-3)


def test_a_stale_compressor_row_is_noticed() -> None:
    # The reset test has teeth: an op that reads entries that do not exist yet sees the poison.
    def reads_everything(
        q_THD: Tensor, keys: Any, selected_TK: Tensor | None, *rest: Any
    ) -> Tensor:
        early = None if selected_TK is None else selected_TK.clamp(min=0)
        return TORCH.sparse_attention(q_THD, keys, early, *rest)

    engine = tiny_engine(ops=dataclasses.replace(TORCH, sparse_attention=reads_everything))
    poison(engine)
    assert bool(engine.logits(random_ids(3)).isnan().any())
