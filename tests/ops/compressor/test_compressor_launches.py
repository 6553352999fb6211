"""Which kernels compress records, without a GPU."""

from dataclasses import replace

import pytest
import torch

from dsv4.caches.layer import CompressorRing
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops.compressor import decode
from tests.ops.compressor.meta import META, SHAPES, arguments, float32, record
from tests.ops.recorded import assert_serves_shorter_chunks, functions, launches, meta

# Columns beside the products in the tensor that they are part of.
SPARE = 24


@pytest.mark.parametrize("name", SHAPES)
def test_a_decode_step_is_one_launch(name: str) -> None:
    *_, blocks, groups = SHAPES[name]
    for tokens in range(1, 9):
        (launch,) = record(arguments(name, tokens))
        shape = launch.shape
        defined = dict(shape.kernel.defines)
        assert functions([launch]) == ["compress"]
        assert (shape.grid, shape.threads, shape.cluster) == ((blocks, tokens, 1), 512, blocks)
        assert (defined["BLOCKS"], defined["GROUPS"]) == (blocks, groups)
        assert shape.shared_bytes == defined["SHARED_BYTES"]
        assert (launch.arguments["store"], shape.numbers) == (1, {"count": tokens})


@pytest.mark.parametrize("name", SHAPES)
def test_a_longer_step_stores_the_ring_afterwards(name: str) -> None:
    given = arguments(name, 512)
    windows, ring = record(given)
    assert functions([windows, ring]) == ["compress", "compress_ring"]
    assert windows.arguments["store"] == 0
    assert windows.shape.grid == (SHAPES[name][3], 512 // SHAPES[name][0], 1)
    assert ring.shape.grid == (min(512, given["state"].ring.kv.shape[0]), 1, 1)
    assert ring.shape.kernel.defines == windows.shape.kernel.defines


@pytest.mark.parametrize("tokens", [5, 20])
def test_products_may_be_columns_of_a_wider_tensor(tokens: int) -> None:
    for launch in record(arguments("csa", tokens, SPARE)):
        assert launch.arguments["kv_stride"] == launch.arguments["score_stride"] == 1024 + SPARE


@pytest.mark.parametrize("most", [512, 2048])
@pytest.mark.parametrize("name", SHAPES)
def test_a_prefill_recording_serves_shorter_chunks(name: str, most: int) -> None:
    assert_serves_shorter_chunks(lambda tokens: record(arguments(name, tokens)), most)


@pytest.mark.parametrize("tokens", [2, 20])
def test_bad_input_is_named(tokens: int) -> None:
    good = arguments("csa", tokens)
    weights = good["weights"]
    state = good["state"]
    short = CompressorRing(float32(15, 1024), float32(15, 1024))
    wide = RowCache.allocate(4, 16_384, 64, RowFormat.PLAIN, torch.bfloat16, META)
    bad = [
        ("kv_TW", "kv_TW", meta(tokens, 1024)),
        ("kv_TW", "kv_TW", float32(tokens, 1024, 2)[..., 0]),
        ("kv_TW", "kv_TW", float32(tokens, 512)),
        ("score_TW", "score_TW", float32(tokens - 1, 1024)),
        ("positions_T", "positions_T", meta(tokens, dtype=torch.int32)),
        ("norm", "weights", replace(weights, norm=meta(512))),
        ("ape", "weights", replace(weights, ape=float32(8, 1024))),
        ("compute_dtype", "weights", replace(weights, compute_dtype=torch.float16)),
        ("ring", "state", replace(state, ring=short)),
        ("kv_TW", "state", replace(state, rows=wide)),
    ]
    for name, argument, value in bad:
        with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
            record({**good, argument: value})


def test_a_decode_step_has_at_most_8_tokens() -> None:
    with pytest.raises(ValueError, match="kv_TW: found 9 tokens, expected at most 8"):
        launches(decode.compress, *arguments("csa", 9).values(), tokens=9)
