"""Which kernels prepare_attention records, without a GPU: one for a decode step of a model, else
those of its parts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat
from dsv4.integers import ceil_div
from dsv4.launch.items import Launch
from dsv4.ops.prepare_attention import Queries, decode, prefill
from tests.ops.forms import by_tokens
from tests.ops.prepare_attention.cases import RATIOS, Step, step
from tests.ops.recorded import assert_serves_shorter_chunks, functions, launches, meta

HEADS = {"Flash": 64, "Pro": 128}
INDEX_HEADS = 64
PARTS = {
    "window": ["query_rope", "query_rope"],
    "hca": ["query_rope", "query_rope", "compress"],
    "csa": ["query_rope", "query_rope", "compress", "compress", "index_query"],
}
LONG_PARTS = {
    "window": ["query_rope", "kv_write"],
    "hca": ["query_rope", "kv_write", "compress", "compress_ring"],
    "csa": [
        *("query_rope", "kv_write"),
        *("compress", "compress_ring", "compress", "compress_ring"),
        "index_query",
    ],
}


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def model_step(kind: str, tokens: int, model: str = "Flash", **options: Any) -> Step:
    """A step whose caches have room for the longest chunk, whatever its own length is."""
    found = step(kind, 0, tokens, HEADS[model], INDEX_HEADS, **options)
    roomy = [
        replace(part, state=replace(part.state, rows=with_slots(part.state.rows, 600)))
        for part in found.compressions
    ]
    return replace(found, ring=with_slots(found.ring, 2187), compressions=tuple(roomy))


def with_slots(rows: RowCache, slots: int) -> RowCache:
    """An empty cache of the same format."""
    shape = (rows.width, rows.rope_width, rows.format, rows.data.dtype)
    return RowCache.allocate(slots, *shape, torch.device("meta"))


def record(case: Step) -> list[Launch]:
    tokens = case.kv_TD.shape[0]
    op = by_tokens(decode.prepare_attention, prefill.prepare_attention)
    return launches(op, *case.arguments(), tokens=tokens)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("kind", RATIOS)
def test_a_decode_step_of_a_model_is_one_launch(kind: str, model: str, quantised: bool) -> None:
    for tokens in range(1, 9):
        (launch,) = record(model_step(kind, tokens, model, quantised=quantised))
        shape = launch.shape
        assert functions([launch]) == ["prepare_attention"]
        assert (shape.cluster, shape.threads) == (
            8 if kind == "hca" else 1,
            256 if kind == "window" else 512,
        )
        # A warp per row: the key, the queries and the index queries; blocks fill clusters.
        rows = 1 + HEADS[model] + (INDEX_HEADS if kind == "csa" else 0)
        blocks = {"window": 0, "csa": 2, "hca": 8}[kind] + ceil_div(rows, 8)
        assert shape.grid == (ceil_div(blocks, shape.cluster) * shape.cluster, tokens, 1)


def test_arguments_of_the_two_compressors_are_told_apart() -> None:
    case = model_step("csa", 2)
    (launch,) = record(case)
    for prefix, part in zip(("main", "keys"), case.compressions, strict=True):
        assert launch.arguments[f"{prefix}_kv"] is part.kv_TW
        assert launch.arguments[f"{prefix}_score"] is part.score_TW
        assert launch.arguments[f"{prefix}_ape"] is part.weights.ape
        assert launch.arguments[f"{prefix}_norm"] is part.weights.norm
        assert launch.arguments[f"{prefix}_ring_kv"] is part.state.ring.kv
        assert launch.arguments[f"{prefix}_ring_score"] is part.state.ring.score
        assert launch.arguments[f"{prefix}_data"] is part.state.rows.data
        assert launch.arguments[f"{prefix}_scale"] is part.state.rows.block_scale
        assert launch.arguments[f"{prefix}_row_slots"] == part.state.rows.slots
        assert launch.arguments[f"{prefix}_ring_slots"] == part.state.ring.kv.shape[0]


@pytest.mark.parametrize("kind", RATIOS)
def test_a_longer_step_goes_in_parts(kind: str) -> None:
    assert functions(record(model_step(kind, 9))) == LONG_PARTS[kind]


@pytest.mark.parametrize("most", [512, 2048])
@pytest.mark.parametrize("kind", RATIOS)
def test_a_prefill_recording_serves_shorter_chunks(kind: str, most: int) -> None:
    assert_serves_shorter_chunks(lambda tokens: record(model_step(kind, tokens)), most)


def other_table(case: Step) -> Step:
    return replace(case, norm=replace(case.norm, inv_freq=torch.empty_like(case.norm.inv_freq)))


def float32_products(case: Step) -> Step:
    return with_weights(case, compute_dtype=torch.float32)


def other_eps(case: Step) -> Step:
    return with_weights(case, norm_eps=1e-5)


def columns_of_wider_products(case: Step) -> Step:
    part = case.compressions[0]
    tokens, columns = part.kv_TW.shape
    wide = meta(tokens, columns + 8, dtype=torch.float32)
    strided = replace(part, kv_TW=wide[:, :columns], score_TW=wide[:, 8:])
    return replace(case, compressions=(strided, *case.compressions[1:]))


def with_weights(case: Step, **changes: Any) -> Step:
    part = case.compressions[0]
    changed = replace(part, weights=replace(part.weights, **changes))
    return replace(case, compressions=(changed, *case.compressions[1:]))


@pytest.mark.parametrize(
    "change", [other_table, float32_products, other_eps, columns_of_wider_products]
)
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_what_the_kernel_does_not_know_goes_in_parts(kind: str, change: Any) -> None:
    assert functions(record(change(model_step(kind, 3)))) == PARTS[kind]


def test_index_queries_between_borders_go_in_parts() -> None:
    case = model_step("csa", 3)
    q_THD, index_TID = case.queries
    assert index_TID is not None
    shifted = meta(index_TID.numel() + 2)[2:].view(index_TID.shape)
    found = record(replace(case, queries=Queries(q_THD, shifted)))
    assert functions(found) == PARTS["csa"]
    query = next(launch for launch in found if launch.shape.kernel.function == "index_query")
    assert dict(query.shape.kernel.defines)["ALIGNED"] == 0


@pytest.mark.parametrize("tokens", [3, 20])
def test_wide_rows_go_to_the_kernels_of_any_geometry(tokens: int) -> None:
    case = model_step("window", tokens)
    wide = replace(
        case,
        queries=Queries(meta(tokens, 4, 2048), None),
        kv_TD=meta(tokens, 2048),
        norm=replace(case.norm, kv_norm=meta(2048, dtype=torch.float32)),
        ring=RowCache.allocate(
            144, 2048, 64, RowFormat.KV_FP8, torch.bfloat16, torch.device("meta")
        ),
    )
    assert functions(record(wide)) == ["query_rope_any_geometry", "kv_write_any_geometry"]


@pytest.mark.parametrize("tokens", [2, 20])
def test_bad_input_is_named(tokens: int) -> None:
    case = model_step("csa", tokens)
    q_THD, index_TID = case.queries
    part = case.compressions[0]
    assert index_TID is not None

    def with_queries(q: Tensor, index: Tensor | None = index_TID) -> Step:
        return replace(case, queries=Queries(q, index))

    bad = [
        ("q_THD", with_queries(meta(*q_THD.shape, dtype=torch.float32))),
        ("q_THD", with_queries(meta(tokens, 64, 1024)[..., :512])),
        ("q_TID", with_queries(q_THD, meta(tokens, 64, 256)[..., :128])),
        ("kv_TD", replace(case, kv_TD=meta(tokens, 1024)[:, :512])),
        ("norm_weight", replace(case, norm=replace(case.norm, kv_norm=meta(512)))),
        ("positions_T", replace(case, positions_T=case.positions_T[:1])),
        (
            "score_TW",
            replace(case, compressions=(replace(part, score_TW=part.score_TW[:1]),)),
        ),
    ]
    for name, broken in bad:
        with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
            record(broken)


def test_a_decode_step_has_at_most_8_tokens() -> None:
    with pytest.raises(ValueError, match="q_THD: found 9 tokens, expected at most 8"):
        launches(decode.prepare_attention, *model_step("csa", 9).arguments(), tokens=9)
