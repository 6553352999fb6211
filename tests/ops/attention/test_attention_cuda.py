"""Decode attention on the GPU: real shapes, every kind of layer, lengths at every boundary, graphs,
bad input.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowFormat
from dsv4.ops.immediate import PreparedOp
from tests.ops.attention.decode_cases import (
    CSA,
    ENTRIES,
    HCA,
    HEAD_DIM,
    RECORDED,
    WINDOW,
    WINDOW_ONLY,
    check,
    inv_freq,
    normal,
    random_keys,
    row_cache,
    selection,
    sparse_attention,
)
from tests.ops.gpu import (
    assert_no_synchronisation,
    assert_replay_is_eager,
    guarded,
)

pytestmark = pytest.mark.gpu

FORMATS = [RowFormat.KV_FP8, RowFormat.PLAIN]
IDS = ["fp8", "bf16"]


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize(("heads", "listed"), [(128, 1024), (64, 512), (4, 64), (20, 3)])
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (3, 2), (127, 1), (500, 3), (2047, 1), (5600, 1), (5590, 8)]
)
def test_selected_entries(
    format: RowFormat, heads: int, listed: int, start: int, tokens: int
) -> None:
    q_THD = normal(tokens, heads, HEAD_DIM, seed=5).bfloat16()
    check(q_THD, random_keys(CSA, format), selection(tokens, start, listed), start)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize("heads", [128, 64, 4, 1])
@pytest.mark.parametrize("ratio", [HCA, WINDOW_ONLY])
@pytest.mark.parametrize("start", [0, 1, 126, 127, 128, 255, 4095, 65_535, 170_000, 1_000_000])
def test_all_complete_entries(format: RowFormat, heads: int, ratio: int, start: int) -> None:
    tokens = 1 + start % 3
    check(
        normal(tokens, heads, HEAD_DIM, seed=6).bfloat16(), random_keys(ratio, format), None, start
    )


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize(("heads", "tokens"), [(128, 1), (64, 1), (4, 1), (128, 2), (64, 8)])
@pytest.mark.parametrize("start", [100, 128 * 1920 - 2, 128 * 1930, 128 * 8200 + 5])
def test_a_million_tokens_of_context(
    format: RowFormat, heads: int, tokens: int, start: int
) -> None:
    """Room for 8200 entries; from 2048 keys on several clusters share them."""
    q_THD = normal(tokens, heads, HEAD_DIM, seed=7).bfloat16()
    check(q_THD, random_keys(HCA, format, entries=8200), None, start)


@pytest.mark.parametrize("heads", [64, 32, 8])
def test_a_token_has_the_same_bits_in_steps_of_every_length(heads: int) -> None:
    """Also where clusters share its keys, and where some tokens have few enough for one."""
    keys = random_keys(HCA, RowFormat.KV_FP8, entries=8200)
    tokens = 8
    q_THD = normal(tokens, heads, HEAD_DIM, seed=5).bfloat16()
    sink_H = normal(heads, seed=9)
    frequencies = inv_freq()
    for start in (128 * 1920 - 3, 128 * 8000):
        positions_T = start + torch.arange(tokens, device="cuda")

        def run(first: int, last: int, positions_T: Tensor = positions_T) -> Tensor:
            step = q_THD[first:last].clone(), keys, None, sink_H, positions_T[first:last].clone()
            return sparse_attention(*step, frequencies)

        alone = torch.cat([run(token, token + 1) for token in range(tokens)])
        for last in range(2, tokens + 1):
            assert torch.equal(run(0, last), alone[:last]), (start, last)


def test_replay_where_clusters_share_the_keys() -> None:
    keys = random_keys(HCA, RowFormat.KV_FP8, entries=5000)
    start = 128 * 4000
    q_THD = normal(1, 64, HEAD_DIM, seed=5).bfloat16()
    sink_H = normal(64, seed=9)
    positions_T = torch.tensor([start]).cuda()
    frequencies = inv_freq()
    op = PreparedOp(RECORDED, q_THD, keys, None, sink_H, positions_T, frequencies)
    assert_replay_is_eager(op.run)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_queries_of_any_size(format: RowFormat, scale: float) -> None:
    check(
        normal(1, 64, HEAD_DIM, seed=8, scale=scale).bfloat16(),
        random_keys(CSA, format),
        selection(1, 700, 512),
        700,
    )


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize(("width", "rope_width"), [(64, 16), (32, 8), (96, 32), (20, 6), (512, 32)])
@pytest.mark.parametrize("ratio", [CSA, HCA])
@pytest.mark.parametrize("tokens", [2, 20])
def test_other_geometries(
    format: RowFormat, width: int, rope_width: int, ratio: int, tokens: int
) -> None:
    keys = KeySet(
        row_cache(160, format, 1, width, rope_width),
        row_cache(60, format, 3, width, rope_width),
        ratio,
        WINDOW,
    )
    selected_TK = selection(tokens, 200, 12, 60) if ratio == CSA else None
    check(normal(tokens, 3, width, seed=5).bfloat16(), keys, selected_TK, 200)


def test_float32_rows() -> None:
    keys = random_keys(HCA, RowFormat.PLAIN)
    keys = replace(keys, ring=replace(keys.ring, data=keys.ring.data.float()))
    assert keys.compressed is not None
    keys = replace(keys, compressed=replace(keys.compressed, data=keys.compressed.data.float()))
    check(normal(2, 4, HEAD_DIM, seed=5).bfloat16(), keys, None, 700)


def test_nan_queries_give_nan_and_leave_other_heads_alone() -> None:
    keys = random_keys(CSA, RowFormat.KV_FP8)
    selected_TK = selection(1, 3000, 512)
    q_THD = normal(1, 64, HEAD_DIM, seed=5).bfloat16()
    sink_H = normal(64, seed=9)
    positions_T = torch.tensor([3000]).cuda()
    clean = sparse_attention(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq())
    q_THD[0, 5, 100] = torch.nan
    out = sparse_attention(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq())
    assert bool(out[0, 5].isnan().all())
    out[0, 5] = clean[0, 5]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize("value", [7, 470])
def test_a_visible_row_with_nan_gives_nan(format: RowFormat, value: int) -> None:
    keys = random_keys(WINDOW_ONLY, format)
    positions_T = torch.tensor([70]).cuda()
    row = normal(1, HEAD_DIM, seed=4)
    row[0, value] = torch.nan
    keys.ring.write(torch.tensor([33]).cuda(), row)
    q_THD = normal(1, 20, HEAD_DIM, seed=5).bfloat16()
    sink_H = normal(20, seed=9)
    assert bool(sparse_attention(q_THD, keys, None, sink_H, positions_T, inv_freq()).isnan().all())


def test_entries_outside_the_cache_are_not_read() -> None:
    keys = random_keys(CSA, RowFormat.KV_FP8)
    positions_T = torch.tensor([3000]).cuda()
    q_THD = normal(1, 64, HEAD_DIM, seed=5).bfloat16()
    sink_H = normal(64, seed=9)
    outside = torch.tensor([[4, ENTRIES, 1 << 40, -5, 7]]).cuda()
    found = sparse_attention(q_THD, keys, outside, sink_H, positions_T, inv_freq())
    expected = sparse_attention(
        q_THD, keys, torch.tensor([[4, -1, -1, -1, 7]]).cuda(), sink_H, positions_T, inv_freq()
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
@pytest.mark.parametrize("ratio", [CSA, HCA, WINDOW_ONLY])
@pytest.mark.parametrize("tokens", [1, 4])
def test_graph_replay_and_no_synchronisation(format: RowFormat, ratio: int, tokens: int) -> None:
    keys = random_keys(ratio, format)
    start = 4000
    selected_TK = selection(tokens, start, 1024) if ratio == CSA else None
    q_THD = normal(tokens, 128, HEAD_DIM, seed=5).bfloat16()
    sink_H = normal(128, seed=9)
    positions_T = start + torch.arange(tokens, device="cuda")
    frequencies = inv_freq()

    op = PreparedOp(RECORDED, q_THD, keys, selected_TK, sink_H, positions_T, frequencies)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)


def test_nothing_but_the_output_is_written() -> None:
    keys = random_keys(CSA, RowFormat.KV_FP8)
    selected_TK = selection(2, 3000, 512)
    q_THD, check_q = guarded(normal(2, 64, HEAD_DIM, seed=5).bfloat16())
    data, check_data = guarded(keys.ring.data)
    before = data.clone()
    keys = replace(keys, ring=replace(keys.ring, data=data))
    sparse_attention(
        q_THD,
        keys,
        selected_TK,
        normal(64, seed=9),
        3000 + torch.arange(2, device="cuda"),
        inv_freq(),
    )
    check_q()
    check_data()
    assert torch.equal(data, before)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("q_THD", {"q": torch.zeros(1, 64, HEAD_DIM)}),
        ("q_THD", {"q": torch.zeros(1, 64, 64, dtype=torch.bfloat16)}),
        ("sink_H", {"sink": torch.zeros(63)}),
        ("sink_H", {"sink": torch.zeros(64, dtype=torch.bfloat16)}),
        ("positions_T", {"positions": torch.zeros(1, dtype=torch.int32)}),
        ("selected_TK", {"selected": torch.zeros(2, 8, dtype=torch.int64)}),
        ("inv_freq", {"frequencies": torch.zeros(16)}),
    ],
)
def test_bad_input_is_named(name: str, broken: dict[str, Tensor]) -> None:
    given = {
        "q": torch.zeros(1, 64, HEAD_DIM, dtype=torch.bfloat16),
        "selected": torch.zeros(1, 8, dtype=torch.int64),
        "sink": torch.zeros(64),
        "positions": torch.zeros(1, dtype=torch.int64),
        "frequencies": torch.zeros(32),
    }
    q, selected, sink, positions, frequencies = ({**given, **broken}[key].cuda() for key in given)
    with pytest.raises(ValueError, match=f"{name}.*: found .* expected"):
        sparse_attention(
            q, random_keys(CSA, RowFormat.KV_FP8), selected, sink, positions, frequencies
        )
