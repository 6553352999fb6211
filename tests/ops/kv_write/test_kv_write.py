"""kv_write: normalise, rotate, quantise, store at position mod slots."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat, pack_kv_rows
from dsv4.ops import kv_write as reference
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope
from tests.ops import forms
from tests.ops.cases import (
    ELEMENTWISE,
    EPS,
    HEAD_DIM,
    ROPE_DIM,
    assert_rounded_once,
    exact_rope,
    inv_freq,
    normal,
)

KvWrite = Callable[[Tensor, Tensor, Tensor, Tensor, RowCache, float], None]


@pytest.fixture
def kv_write(backend: str) -> KvWrite:
    return forms.part(backend, reference.kv_write, forms.kv_write)


def ring(slots: int, format: RowFormat, dtype: torch.dtype) -> RowCache:
    return RowCache.allocate(slots, HEAD_DIM, ROPE_DIM, format, dtype, torch.get_default_device())


def exact_row(kv: Tensor, weight: Tensor, position: int) -> Tensor:
    values = kv.double()
    values = values * (values.square().mean() + EPS) ** -0.5 * weight.double()
    return exact_rope(values, position, inv_freq(0))


@pytest.mark.parametrize("start", [0, 130, 1_000_000])
def test_rows_land_in_their_ring_slots(kv_write: KvWrite, start: int) -> None:
    cache = ring(144, RowFormat.PLAIN, torch.float32)
    cache.data.fill_(torch.nan)
    kv_TD = normal(20, HEAD_DIM, seed=1)
    weight = normal(HEAD_DIM, seed=2)
    kv_write(kv_TD, weight, start + torch.arange(20), inv_freq(0), cache, EPS)
    written = [(start + t) % 144 for t in range(20)]
    for t, slot in enumerate(written):
        assert_rounded_once(cache.data[slot], exact_row(kv_TD[t], weight, start + t), ELEMENTWISE)
    others = [slot for slot in range(144) if slot not in written]
    assert bool(cache.data[others].isnan().all()), "a slot of another position was touched"


def test_quantised_rows_hold_the_bytes_of_pack_kv_rows(kv_write: KvWrite) -> None:
    cache = ring(136, RowFormat.KV_FP8, torch.bfloat16)
    kv_TD = normal(9, HEAD_DIM, seed=3, dtype=torch.bfloat16)
    weight = normal(HEAD_DIM, seed=4)
    position_T = 131 + torch.arange(9)
    kv_write(kv_TD, weight, position_T, inv_freq(4), cache, EPS)
    data, block_scale = pack_kv_rows(
        rope(rms_norm(kv_TD, weight, EPS), position_T, inv_freq(4)), ROPE_DIM
    )
    assert cache.block_scale is not None
    assert torch.equal(cache.data[position_T % 136], data)
    assert torch.equal(cache.block_scale[position_T % 136], block_scale)


def test_a_full_ring_can_be_written_at_once(kv_write: KvWrite) -> None:
    cache = ring(16, RowFormat.PLAIN, torch.float32)
    kv_write(
        normal(16, HEAD_DIM, seed=5),
        torch.ones(HEAD_DIM),
        5 + torch.arange(16),
        inv_freq(0),
        cache,
        EPS,
    )
    assert bool((cache.data.abs().sum(1) > 0).all())


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 3, 2**40])
def test_spec11_b14_slots_of_positions_beyond_32_bits(kv_write: KvWrite, start: int) -> None:
    cache = ring(136, RowFormat.PLAIN, torch.float32)
    kv_write(
        normal(5, HEAD_DIM, seed=7),
        torch.ones(HEAD_DIM),
        start + torch.arange(5),
        inv_freq(0),
        cache,
        EPS,
    )
    written = {slot for slot in range(136) if bool(cache.data[slot].any())}
    assert written == {(start + t) % 136 for t in range(5)}
