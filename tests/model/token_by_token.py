"""An op table whose arithmetic does not depend on how many tokens a step has, for bitwise tests of
the state.

Matrix products of different heights round differently, and one different last bit moves a value
across a rounding boundary of bfloat16 or fp8. With one product per token nothing is left but what a
step does to the caches and the position, which is then compared bit by bit. What writes state
(``kv_write``, ``compress``) is the normal code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.ops import TORCH, Ops
from dsv4.ops.trees import is_named_tuple
from tests.model.parts import Parts, with_parts

# Operands with one row per token, by position in the signature.
PER_TOKEN_OPERANDS = {
    "linear": (0,),
    "linear_rows": (0,),
    "grouped_linear": (0,),
    "row_parallel_linear": (0,),
    "vocab_parallel_linear": (0,),
    "hc_pre": (0,),
    "hc_seam": (0, 1, 2, 3),
    "hc_post": (0, 1, 2, 3),
    "hc_head": (0,),
    "index_select": (0, 1, 4),
    "sparse_attention": (0, 2, 4),
    "moe": (0, 1),
}


def one_token_at_a_time(ops: Ops = TORCH) -> Ops:
    """``ops`` with every stateless op called once per token."""
    wrapped = {
        name: per_token(ops.__dict__[name], operands)
        for name, operands in PER_TOKEN_OPERANDS.items()
    }
    parts = {
        name: per_token(Parts()._asdict()[name], (0, 1)) for name in ("query_rope", "index_query")
    }
    return with_parts(dataclasses.replace(ops, **wrapped), **parts)


def per_token(op: Callable[..., Any], operands: tuple[int, ...]) -> Callable[..., Any]:
    """``op`` applied to one row of each of its per-token operands at a time, the results
    concatenated.
    """

    def apply(*arguments: Any) -> Any:
        rows = range(arguments[operands[0]].shape[0])
        results = [
            op(*(row_of(arguments, operands, index, row) for index in range(len(arguments))))
            for row in rows
        ]
        if isinstance(results[0], Tensor):
            return torch.cat(results)
        parts = [torch.cat(part) for part in zip(*results, strict=True)]
        return type(results[0])(*parts) if is_named_tuple(results[0]) else tuple(parts)

    return apply


def row_of(arguments: tuple[Any, ...], operands: tuple[int, ...], index: int, row: int) -> Any:
    """One argument for one token: its row, or itself when it is shared (or None)."""
    argument = arguments[index]
    return argument[row : row + 1] if index in operands and argument is not None else argument
