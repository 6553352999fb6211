"""prepare_attention: its parts on the right operands, and nothing else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4.ops import Ops, compressor, indexer, kv_write, rope
from dsv4.ops.indexer.query import index_query
from tests.ops import forms
from tests.ops.prepare_attention.cases import RATIOS, step

STARTS = (0, 2, 3, 4, 7, 120, 126, 127, 128, 255, 20_002)


class Parts(NamedTuple):
    """What a step between projections and attention consists of."""

    query_rope: Callable[..., Any]
    kv_write: Callable[..., Any]
    compress: Callable[..., Any]
    index_query: Callable[..., Any]


@pytest.fixture
def parts(backend: str) -> Parts:
    return Parts(
        forms.part(backend, rope.query_rope, forms.query_rope),
        forms.part(backend, kv_write.kv_write, forms.kv_write),
        forms.part(backend, compressor.compress, forms.compress),
        forms.part(backend, indexer.index_query, index_query),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 130])
def test_equals_its_parts_bit_by_bit(
    ops: Ops, parts: Parts, kind: str, quantised: bool, tokens: int
) -> None:
    for start in STARTS:
        found = step(kind, start, tokens, quantised=quantised)
        expected = found.twin()
        queries = ops.prepare_attention(*found.arguments())
        norm = expected.norm
        position_T = expected.positions_T
        q_THD = parts.query_rope(expected.queries.q_THD, position_T, norm.inv_freq, norm.eps)
        parts.kv_write(
            expected.kv_TD, norm.kv_norm, position_T, norm.inv_freq, expected.ring, norm.eps
        )
        for one in expected.compressions:
            parts.compress(one.kv_TW, one.score_TW, position_T, one.weights, one.state)
        assert_same_bytes(queries.q_THD, q_THD, f"queries at {start}")
        assert (queries.index_TID is None) == (kind != "csa")
        if expected.queries.index_TID is not None and queries.index_TID is not None:
            index_TID = parts.index_query(expected.queries.index_TID, position_T, norm.inv_freq)
            assert_same_bytes(queries.index_TID, index_TID, f"index queries at {start}")
        for index, (one, two) in enumerate(zip(found.caches(), expected.caches(), strict=True)):
            assert_same_bytes(one, two, f"cache {index} at {start}")


def assert_same_bytes(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    ), what


def test_inputs_are_left_as_they_are(ops: Ops) -> None:
    case = step("csa", 7, 5)
    assert case.queries.index_TID is not None
    inputs = [
        case.queries.q_THD,
        case.queries.index_TID,
        case.kv_TD,
        case.positions_T,
        case.norm.kv_norm,
    ]
    inputs += [
        part for one in case.compressions for part in (one.kv_TW, one.score_TW, one.weights.ape)
    ]
    before = [tensor.clone() for tensor in inputs]
    ops.prepare_attention(*case.arguments())
    assert all(torch.equal(one, two) for one, two in zip(inputs, before, strict=True))
