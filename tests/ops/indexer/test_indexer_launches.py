"""What the indexer's launchers record."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.caches.rows import RowFormat
from dsv4.integers import ceil_div
from dsv4.launch.buffers import byte_offset, storage_key
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.indexer import decode, prefill
from dsv4.ops.indexer.query import index_query
from tests.ops.indexer.meta import WIDTH, Arguments, selection
from tests.ops.recorded import (
    BLACKWELL,
    HOPPER,
    SHORTER,
    TARGETS,
    assert_serves_shorter_chunks,
    functions,
    launches,
    meta,
    shape_at,
)

PLAIN = RowFormat.PLAIN
FP8_KEYS = selection(2, 100).keys
# Keys of a context of 8k, of 128k, of 1M tokens, and fewer of them than are selected.
SLOTS = (2049, 32769, 262145, 40)
# (heads, format, dtype of plain keys): of Flash and Pro, and what tensor cores take as well.
USUAL = {
    "fp8": (64, RowFormat.INDEX_FP8, torch.bfloat16),
    "bf16": (64, PLAIN, torch.bfloat16),
    "8 heads": (8, RowFormat.INDEX_FP8, torch.bfloat16),
}
UNUSUAL = {
    "f32": (64, PLAIN, torch.float32),
    "4 heads": (4, RowFormat.INDEX_FP8, torch.bfloat16),
    "72 heads": (72, PLAIN, torch.bfloat16),
}


def selected(arguments: Arguments, target: Target = HOPPER) -> list[Launch]:
    tokens = arguments.q_TID.shape[0]
    module = decode if tokens <= 8 else prefill
    return launches(module.index_select, *arguments, tokens=tokens, target=target)


def reached(found: list[Launch], tokens: int) -> list[tuple[object, list[int]]]:
    """What is launched for so many tokens, and where every tensor that it gets begins."""
    return [
        (shape_at(launch, tokens), list(map(byte_offset, launch.tensors)))
        for launch in found
        if shape_at(launch, tokens) is not None
    ]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_decode_step_scores_and_selects(tokens: int, target: Target) -> None:
    blocks = target.multiprocessors
    for slots in SLOTS:
        for geometry in USUAL.values():
            found = selected(selection(tokens, slots, *geometry), target)
            assert functions(found) == ["index_scores", "top_k_tokens"]
            scores, top_k = (launch.shape for launch in found)
            assert scores.grid == (tokens * (blocks // tokens), 1, 1), "no more than fit at once"
            cluster = 8 if slots > 16384 else 1
            assert (top_k.cluster, top_k.grid) == (cluster, (cluster * tokens, 1, 1))
        for geometry in UNUSUAL.values():
            found = selected(selection(tokens, slots, *geometry), target)
            assert functions(found) == ["index_scores_any_geometry", "top_k_tokens"]


@pytest.mark.parametrize("geometry", [*USUAL, *UNUSUAL])
def test_a_prefill_recording_serves_shorter_chunks(geometry: str) -> None:
    arguments = {**USUAL, **UNUSUAL}[geometry]

    def record(tokens: int) -> list[Launch]:
        return selected(selection(tokens, 8193, *arguments), BLACKWELL)

    for most in (512, 2048):
        assert_serves_shorter_chunks(record, most)


def test_scores_take_at_most_256_mb_in_tiles_that_short_chunks_do_not_reach() -> None:
    """262,148 scores of a token: tiles of 255 tokens. The last may have as few as a decode step."""
    longest = selected(selection(1024, 262145))
    many, few = ["index_scores_sm90", "top_k_tokens"], ["index_scores", "top_k_tokens"]
    assert functions(longest) == many * 4 + few
    scores = [launch.arguments["scores"] for launch in longest[::2]]
    assert {storage_key(tensor) for tensor in scores if isinstance(tensor, torch.Tensor)} == {
        storage_key(longest[0].tensors[-1])
    }
    for tensor in scores:
        assert isinstance(tensor, torch.Tensor)
        assert tensor.nbytes <= 256 << 20
    for tokens in (*SHORTER, 255, 256, 259, 263, 264, 1024):
        exact = selected(selection(tokens, 262145))
        assert len(exact) == 2 * ceil_div(tokens, 255)
        assert reached(longest, tokens) == reached(exact, tokens)
    of_last = longest[-1].shape_of
    assert of_last is not None
    assert [of_last(tokens) for tokens in (9, 1020)] == [None, None]
    last = of_last(1024)
    assert isinstance(last, Shape)
    assert (last.cluster, last.grid[0]) == (8, 8 * 4)


def test_memory_of_a_result_is_that_of_the_longest_chunk() -> None:
    recording = Recording(HOPPER, 300)
    selected_TK = prefill.index_select(recording, *selection(300, 262145))
    assert (tuple(selected_TK.shape), selected_TK.dtype) == ((300, 512), torch.int64)
    selected_TK = prefill.index_select(recording, *selection(300, 40))
    assert tuple(selected_TK.shape) == (300, 40)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("heads", "width"), [(64, 128), (4, 128), (3, 256), (5, 16)])
def test_queries_are_rotated_in_one_launch(heads: int, width: int, target: Target) -> None:
    def record(tokens: int) -> list[Launch]:
        arguments = meta(tokens, heads, width), meta(tokens, dtype=torch.int64)
        frequencies = meta(width // 4, dtype=torch.float32)
        return launches(index_query, *arguments, frequencies, tokens=tokens, target=target)

    for tokens in range(1, 9):
        found = record(tokens)
        assert functions(found) == ["index_query"]
        assert found[0].shape.grid == (ceil_div(heads, 2), tokens, 1)
    assert record(9)[0].shape.grid == (1, 9, 1)
    for most in (512, 2048):
        assert_serves_shorter_chunks(record, most)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"q_TID": meta(2, 64, WIDTH, dtype=torch.float32)},
            r"q_TID: found torch\.float32, expected torch\.bfloat16",
        ),
        ({"q_TID": meta(2, WIDTH, 64).mT}, r"q_TID: found strides .*, expected"),
        ({"weight_TI": meta(1, 64, dtype=torch.float32)}, "weight_TI: found"),
        ({"weight_TI": meta(64, 2, dtype=torch.float32).mT}, "weight_TI: found strides"),
        ({"positions_T": meta(2, dtype=torch.int32)}, "positions_T: found"),
        ({"q_TID": meta(2, 64, 64)}, "keys: found index_fp8 rows of 128, expected"),
        ({"index_topk": 0}, "index_topk: found 0, expected at least 1"),
        (
            {"keys": replace(FP8_KEYS, block_scale=None)},
            r"keys\.block_scale: found None, expected torch\.float32",
        ),
        (
            {"keys": replace(FP8_KEYS, format=PLAIN, block_scale=None)},
            r"keys: found plain rows of torch\.uint8, expected torch\.bfloat16 or",
        ),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments = selection(2, 100)._replace(**changed)
    with pytest.raises(ValueError, match=message):
        decode.index_select(Recording(HOPPER, 2), *arguments)


def test_head_weights_may_have_gaps_between_their_rows() -> None:
    weight_TI = meta(2, 80, dtype=torch.float32)[:, 16:]
    scores, _ = selected(selection(2, 100)._replace(weight_TI=weight_TI))
    assert scores.arguments["weight_stride"] == 80
