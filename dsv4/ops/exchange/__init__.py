"""Sums over the ranks of tensor parallelism, and the products whose weights are cut over them
(docs/tensor_parallel.md).

Each rank has some of the columns of a row-parallel weight and of the rows of a vocabulary-parallel
one. A lone rank has all of them: its sum is its product.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.ops.linear import linear
from dsv4.weights.quant import Weight


def sum_ranks(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """((p0 + p1) + p2) + … of float32 partial results, one by rank, rounded once to ``dtype``."""
    total, *others = parts
    for part in others:
        total = total + part
    return total.to(dtype)


def row_parallel_linear(x_TK: Tensor, weight: Weight) -> Tensor:
    """y = x · Wᵀ ``[T, N]`` of the whole K, in the dtype of x; this is the form of a lone rank."""
    return linear(x_TK, weight)


def vocab_parallel_linear(hidden_TE: Tensor, weight: Weight) -> Tensor:
    """float32 logits of this rank's rows of the head, for ``gather_logits``."""
    return linear(hidden_TE, weight, torch.float32)


def gather_logits(logits_TV: Tensor) -> Tensor:
    """float32 ``[T, V]`` of all ranks' rows; a lone rank has them."""
    return logits_TV


def summed(y_TE: Tensor) -> Tensor:
    """A sublayer's result by itself, where it may still be on its way from the ranks."""
    return y_TE
