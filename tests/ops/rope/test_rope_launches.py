"""Which kernels query_rope records, without a GPU."""

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.ops.rope.cuda import DECODE_ROWS_PER_BLOCK, query_rope
from tests.ops.recorded import assert_serves_shorter_chunks, functions, launches, meta

EPS = 1e-6


def record(
    tokens: int, heads: int, width: int = 512, rope_width: int = 64, rows: int | None = None
) -> list[Launch]:
    queries = meta(tokens, heads, width)
    frequencies = meta(rope_width // 2, dtype=torch.float32)
    positions_T = meta(tokens, dtype=torch.int64)
    return launches(query_rope, queries, positions_T, frequencies, EPS, rows, tokens=tokens)


@pytest.mark.parametrize("heads", [64, 128, 4])
def test_a_decode_step_has_a_warp_per_head(heads: int) -> None:
    for tokens in range(1, 9):
        (launch,) = record(tokens, heads, rows=DECODE_ROWS_PER_BLOCK)
        assert functions([launch]) == ["query_rope"]
        assert launch.shape.grid == (max(1, heads // 8), tokens, 1)
        assert launch.shape.threads == 32 * min(8, heads)
        assert launch.arguments["rows_per_block"] == 8


@pytest.mark.parametrize("heads", [64, 128, 4])
def test_a_longer_step_has_a_block_per_token(heads: int) -> None:
    (launch,) = record(512, heads)
    assert launch.shape.grid == (1, 512, 1)
    assert launch.arguments["rows_per_block"] == heads


@pytest.mark.parametrize(
    ("width", "rope_width"), [(20, 6), (2048, 64), (96, 20), (100, 8)], ids=str
)
@pytest.mark.parametrize("rows", [DECODE_ROWS_PER_BLOCK, None])
def test_rows_that_no_warp_can_hold(width: int, rope_width: int, rows: int | None) -> None:
    (launch,) = record(3, 5, width, rope_width, rows)
    assert functions([launch]) == ["query_rope_any_geometry"]
    assert launch.shape.grid == (5, 3, 1)


def test_queries_between_multiples_of_16_bytes_take_the_other_kernel() -> None:
    queries = meta(3 * 4 * 512 + 1)[1:].view(3, 4, 512)
    rest = meta(3, dtype=torch.int64), meta(32, dtype=torch.float32), EPS
    found = launches(query_rope, queries, *rest, tokens=3)
    assert functions(found) == ["query_rope_any_geometry"]


@pytest.mark.parametrize("most", [512, 2048])
@pytest.mark.parametrize(("heads", "width", "rope_width"), [(128, 512, 64), (5, 20, 6)])
def test_a_prefill_recording_serves_shorter_chunks(
    heads: int, width: int, rope_width: int, most: int
) -> None:
    assert_serves_shorter_chunks(lambda tokens: record(tokens, heads, width, rope_width), most)


def test_bad_input_is_named() -> None:
    good = {
        "q_THD": meta(3, 4, 512),
        "positions_T": meta(3, dtype=torch.int64),
        "inv_freq": meta(32, dtype=torch.float32),
    }
    bad = [
        ("q_THD", meta(3, 4, 512, dtype=torch.float32)),
        ("q_THD", meta(3, 4, 1024)[..., :512]),
        ("q_THD", meta(3, 512)),
        ("q_THD", meta(3, 4, 32)),
        ("positions_T", meta(3, dtype=torch.int32)),
        ("positions_T", meta(2, dtype=torch.int64)),
        ("inv_freq", meta(32, dtype=torch.float64)),
    ]
    for name, tensor in bad:
        arguments = {**good, name: tensor}.values()
        with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
            launches(query_rope, *arguments, EPS, tokens=3)
