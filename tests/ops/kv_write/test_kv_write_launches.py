"""Which kernels kv_write records, without a GPU."""

from typing import Any

import pytest
import torch

from dsv4.caches.rows import RowCache, RowFormat
from dsv4.launch.items import Launch
from dsv4.ops.kv_write import decode, prefill
from tests.ops.forms import by_tokens
from tests.ops.recorded import assert_serves_shorter_chunks, functions, launches, meta

EPS = 1e-6
KINDS = {
    "fp8": (RowFormat.KV_FP8, torch.bfloat16, 0),
    "bf16": (RowFormat.PLAIN, torch.bfloat16, 1),
    "f32": (RowFormat.PLAIN, torch.float32, 2),
}


def arguments(
    tokens: int, width: int = 512, rope_width: int = 64, kind: str = "fp8"
) -> dict[str, Any]:
    format, dtype, _ = KINDS[kind]
    ring = RowCache.allocate(2187, width, rope_width, format, dtype, torch.device("meta"))
    return {
        "kv_TD": meta(tokens, width),
        "norm_weight": meta(width, dtype=torch.float32),
        "positions_T": meta(tokens, dtype=torch.int64),
        "inv_freq": meta(rope_width // 2, dtype=torch.float32),
        "ring": ring,
        "eps": EPS,
    }


def record(given: dict[str, Any]) -> list[Launch]:
    tokens = given["kv_TD"].shape[0]
    op = by_tokens(decode.kv_write, prefill.kv_write)
    return launches(op, *given.values(), tokens=tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_has_a_warp_per_row(kind: str) -> None:
    for tokens in range(1, 9):
        (launch,) = record(arguments(tokens, kind=kind))
        assert functions([launch]) == ["query_rope"]
        assert (launch.shape.grid, launch.shape.threads) == ((1, tokens, 1), 32)
        assert launch.arguments["q"] is None
        assert (launch.arguments["heads"], launch.arguments["format"]) == (0, KINDS[kind][2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_step_has_a_block_per_row(kind: str) -> None:
    (launch,) = record(arguments(512, kind=kind))
    assert functions([launch]) == ["kv_write"]
    assert (launch.shape.grid, launch.shape.threads) == ((512, 1, 1), 256)


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize(("width", "rope_width"), [(20, 6), (2048, 64), (88, 8)], ids=str)
def test_rows_that_no_warp_can_hold(width: int, rope_width: int, tokens: int) -> None:
    """Or whose groups of 64 end in the middle of a lane's eight values."""
    (launch,) = record(arguments(tokens, width, rope_width))
    assert functions([launch]) == ["kv_write_any_geometry"]
    assert launch.shape.grid == (tokens, 1, 1)


@pytest.mark.parametrize("most", [512, 2048])
@pytest.mark.parametrize(("width", "rope_width"), [(512, 64), (20, 6)])
def test_a_prefill_recording_serves_shorter_chunks(width: int, rope_width: int, most: int) -> None:
    assert_serves_shorter_chunks(lambda tokens: record(arguments(tokens, width, rope_width)), most)


@pytest.mark.parametrize("tokens", [3, 20])
def test_bad_input_is_named(tokens: int) -> None:
    index_rows = RowCache.allocate(
        144, 512, 64, RowFormat.INDEX_FP8, torch.bfloat16, torch.device("meta")
    )
    bad = [
        ("kv_TD", meta(tokens, 512, dtype=torch.float32)),
        ("kv_TD", meta(tokens, 1024)[:, :512]),
        ("kv_TD", meta(tokens, 64)),
        ("norm_weight", meta(512)),
        ("norm_weight", meta(7, dtype=torch.float32)),
        ("positions_T", meta(tokens - 1, dtype=torch.int64)),
        ("inv_freq", meta(16, dtype=torch.float32)),
        ("ring", index_rows),
    ]
    for name, value in bad:
        with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
            record({**arguments(tokens), name: value})


def test_a_step_longer_than_the_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_TD: found 2188 tokens, expected at most"):
        record(arguments(2188))
