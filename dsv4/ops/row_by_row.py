"""Steps of several tokens with the bits of steps of one token: every op computes its tokens one
after the other.

A product of several rows may sum in another order than that of one. Where drafts are verified, this
would change the text at temperature 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.ops import Ops, PrepareAttention
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm


def row_by_row(ops: Ops) -> Ops:
    """``ops`` that compute when they are called, for a step of any number of tokens."""
    return replace(
        ops,
        linear=each_token(ops.linear, 0),
        linear_rows=each_token(ops.linear_rows, 0),
        grouped_linear=each_token(ops.grouped_linear, 0),
        row_parallel_linear=each_token(ops.row_parallel_linear, 0),
        vocab_parallel_linear=each_token(ops.vocab_parallel_linear, 0),
        hc_pre=each_token(ops.hc_pre, 0),
        hc_seam=each_token(ops.hc_seam, 0, 1, 2, 3),
        hc_post=each_token(ops.hc_post, 0, 1, 2, 3),
        hc_head=each_token(ops.hc_head, 0),
        prepare_attention=_each_prepared(ops.prepare_attention),
        index_select=each_token(ops.index_select, 0, 1, 4),
        sparse_attention=each_token(ops.sparse_attention, 0, 2, 4),
        moe=each_token(ops.moe, 0, 1),
    )


def each_token(op: Callable[..., Any], *by_token: int) -> Callable[..., Any]:
    """``op`` for one token at a time; the arguments ``by_token`` have a row for each."""

    def run(*arguments: Any, **named: Any) -> Any:
        results = []
        for token in range(arguments[by_token[0]].shape[0]):
            one = list(arguments)
            for index in by_token:
                one[index] = _row(one[index], token)
            results.append(op(*one, **named))
        return _joined(results)

    return run


def _each_prepared(op: PrepareAttention) -> PrepareAttention:
    def run(
        queries: Queries,
        kv_TD: Tensor,
        positions_T: Tensor,
        norm: QueryKeyNorm,
        ring: RowCache,
        compressions: tuple[Compression, ...],
    ) -> Queries:
        results = []
        for token in range(kv_TD.shape[0]):
            parts = tuple(
                replace(part, kv_TW=_row(part.kv_TW, token), score_TW=_row(part.score_TW, token))
                for part in compressions
            )
            one = Queries(*(_row(tensor, token) for tensor in queries))
            place = (_row(kv_TD, token), _row(positions_T, token))
            results.append(op(one, *place, norm, ring, parts))
        return _joined(results)

    return run


def _row(tensor: Tensor | None, token: int) -> Any:
    """The row in memory of its own, as a step of one token has it."""
    return None if tensor is None else tensor[token : token + 1].clone()


def _joined(results: Sequence[Any]) -> Any:
    """The results of all tokens as those of one call: tensors, None, or tuples of them."""
    first = results[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(list(results))
    parts = [_joined(part) for part in zip(*results, strict=True)]
    return tuple(parts) if type(first) is tuple else type(first)(*parts)
