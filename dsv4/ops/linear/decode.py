"""Weight-only linear layers of up to 8 tokens on packed weights: one launch for all matrices of one
or two formats.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.exchange.words import Words
from dsv4.ops.linear import RowList
from dsv4.ops.linear.checks import check_grouped, check_linear, check_norm
from dsv4.ops.linear.decode_product import (
    NO_NORM,
    Norm,
    Product,
    check_tokens,
    list_memory,
    record_product,
)
from dsv4.ops.linear.gathered_rows import (
    GatheredRows,
    multiply_gathered,
    push_share,
    share_of_tiles,
)
from dsv4.ops.linear.row_list import packed_rows
from dsv4.ops.norm.cuda import rms_norm
from dsv4.weights.packed import TILE_ROWS
from dsv4.weights.quant import Weight


def linear(
    recording: Recording, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x · Wᵀ, float32 accumulation, one rounding: see ``dsv4.ops.linear.linear``.

    x bfloat16 ``[T, K]``, T from 1 to 8, y ``[T, N]`` bfloat16 or float32. Products of 4-bit and
    FP8 weights with x are exact in the tensor core, but for values of x below 2^-29 of their
    token's largest. Raises ``ValueError`` naming the argument for anything else.
    """
    dtype = out_dtype or torch.bfloat16
    packed = check_linear(x, weight, dtype)
    y = recording.empty((x.shape[0], packed.shape[0]), dtype)
    record_product(recording, Product.of_matrix(packed, 1, dtype), x.unsqueeze(1), NO_NORM, y)
    return y


def linear_words(recording: Recording, x: Tensor, weight: Weight, words: Words) -> None:
    """``linear`` whose float32 sums are pushed to the ranks as ``words`` instead of rounded."""
    packed = check_linear(x, weight, torch.float32)
    product = Product.of_matrix(packed, 1, torch.float32)
    record_product(recording, product, x.unsqueeze(1), NO_NORM, None, words)


def linear_columns(
    recording: Recording, x: Tensor, weight: Weight, y_TN: Tensor, first: int
) -> None:
    """``linear`` into columns ``first`` and following of float32 ``y_TN``, whose width and
    ``first`` are multiples of 16.
    """
    packed = check_linear(x, weight, torch.float32)
    width = y_TN.shape[1]
    stop = first + packed.shape[0]
    if width % TILE_ROWS or first % TILE_ROWS or stop > width:
        raise ValueError(
            f"y_TN: found columns {first} to {stop} of {width}, expected some of them, and "
            f"multiples of {TILE_ROWS}"
        )
    product = replace(Product.of_matrix(packed, 1, torch.float32), rows=width)
    record_product(recording, product, x.unsqueeze(1), NO_NORM, y_TN[:, first:])


def grouped_linear(recording: Recording, x_TGK: Tensor, weight: Weight) -> Tensor:
    """Block-diagonal linear of 1 to 8 tokens: see ``dsv4.ops.linear.grouped_linear``. x bfloat16
    ``[T, G, K]`` → ``[T, G, R]``.
    """
    packed = check_grouped(x_TGK, weight)
    tokens, groups, _ = x_TGK.shape
    y_TGR = recording.empty((tokens, groups, packed.shape[0] // groups), torch.bfloat16)
    product = Product.of_matrix(packed, groups, torch.bfloat16)
    record_product(recording, product, x_TGK, NO_NORM, y_TGR)
    return y_TGR


def linear_rows(
    recording: Recording,
    x: Tensor | GatheredRows,
    rows: RowList,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Any, ...]:
    """``linear`` of one x ``[T, K]`` with every matrix of the list: see
    ``dsv4.ops.linear.linear_rows``.

    One launch for at most two formats, norm included, and the products are views of one buffer.
    Where ranks share the list, the first one is ``GatheredRows``, which this takes as x.
    """
    packed = packed_rows(rows)
    check_norm(norm_weight, packed.width)
    norm = Norm(norm_weight, norm_eps)
    if isinstance(x, GatheredRows):
        return multiply_gathered(recording, x, packed, norm)
    packed.check(x)
    tokens = x.shape[0]
    check_tokens(tokens)
    share = share_of_tiles(recording, packed)
    if share is not None:
        return push_share(recording, x, packed, share)
    # A block that sees K in slices has no row to normalise.
    products = [Product.of_list(packed, launch, recording) for launch in packed.launches]
    plans = [product.plan(tokens, recording.target) for product in products]
    if norm_weight is not None and any(plan.slice_columns < packed.width for plan in plans):
        x = rms_norm(recording, x, norm_weight, norm_eps)
        norm = NO_NORM
    memory = list_memory(recording, packed, tokens)
    for product in products:
        record_product(recording, product, x.unsqueeze(1), norm, memory)
    return packed.products(memory, tokens)
