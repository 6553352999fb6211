"""Prefill products on Blackwell's tensor cores with bfloat16 activations: the weights of
``dsv4.ops.linear.prefill``, and its numbers, but for the order of float32 sums.

What ``gemm_config`` rejects is recorded as ``dsv4.ops.linear.prefill`` does, and so are dense
products of fewer tokens than ``DENSE_TOKENS`` in the recordings of longer ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import RowList, prefill_rows
from dsv4.ops.linear.aligned import aligned_rows
from dsv4.ops.linear.cutedsl.gemm_config import (
    ARCHITECTURES,
    DENSE_TOKENS,
    TILE_ROWS,
    W16Config,
    W16Problem,
    w16_config,
    w16_configs,
)
from dsv4.ops.linear.prefill import linear_batches
from dsv4.ops.linear.prefill_cutedsl import INSTALLED, Gemm
from dsv4.ops.linear.prefill_long import linear_batches_long, one_group
from dsv4.ops.linear.prefill_products import PrefillProducts
from dsv4.weights.packed import PackedWeight
from dsv4.weights.quant import QuantFormat


@dataclass(frozen=True)
class W16Product:
    """The compiled kernels of a problem, one for each configuration that a number of tokens takes.

    ``problem`` is that of the most tokens, ``rows_per_token`` is 1, or the experts of a token.
    """

    problem: W16Problem
    target: Target
    rows_per_token: int
    gemms: Mapping[W16Config, Gemm]

    @classmethod
    def of(
        cls, recording: Recording, problem: W16Problem, rows_per_token: int = 1
    ) -> "W16Product | None":
        """The kernels for all numbers of tokens of a recording; None where there is none."""
        target = recording.target
        if not INSTALLED:
            return None
        configs = w16_configs(problem, target.architecture, target.multiprocessors, rows_per_token)
        if not configs:
            return None
        gemms = {config: load_gemm(config, target.architecture) for config in configs}
        return cls(problem, target, rows_per_token, gemms)

    def gemm(self, tokens: int) -> Gemm | None:
        """The kernel for a number of tokens; None where another launch takes them."""
        problem = self.problem._replace(tokens=tokens * self.rows_per_token)
        config = w16_config(problem, self.target.architecture, self.target.multiprocessors)
        return self.gemms[config] if isinstance(config, W16Config) else None


def load_gemm(config: W16Config, architecture: str) -> Gemm:
    """The compiled kernel of a configuration; its compiler is imported now."""
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.blackwell_w16 import BlackwellW16

    return jit.load(BlackwellW16, config, architecture)


def exact_scales(weight: PackedWeight) -> bool:
    """Whether decoded weights take up their block scales exactly."""
    return weight.format is not QuantFormat.FP8_BLOCK128 or weight.power_of_two_scales


def gemm_operands(weight: PackedWeight, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Data, block scales and global scales as ``BlackwellW16`` takes them, for one matrix of
    ``groups`` along its rows or a stack; the data again for scales that the format lacks.
    """
    data = weight.data
    scale = weight.block_scale
    if len(weight.shape) == 2:
        # Padding belongs to no group.
        tiles = data.shape[0] if groups == 1 else weight.shape[0] // TILE_ROWS
        data = data[:tiles].unflatten(0, (groups, tiles // groups))
        if scale is not None and weight.format is QuantFormat.FP8_BLOCK128:
            scale = scale.unsqueeze(0)
        elif scale is not None:
            scale = scale[:tiles].unflatten(0, (groups, tiles // groups))
    data = data.flatten(-2)
    if weight.format.group_size is not None and scale is not None:
        scale = scale.flatten(-2)
    total = None if weight.global_scale is None else weight.global_scale.view(-1)
    return data, data if scale is None else scale, data if total is None else total


def _linear_batches(
    recording: Recording, x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype
) -> Tensor:
    x_TGK = aligned_rows(recording, x_TGK)
    tokens, groups, columns = x_TGK.shape
    problem = W16Problem(
        weight.format,
        out_dtype,
        tokens,
        weight.shape[0] // groups,
        columns,
        groups,
        exact_scales=exact_scales(weight),
    )
    product = W16Product.of(recording, problem)
    if product is None:
        return linear_batches_long(recording, x_TGK, weight, out_dtype)
    y_TGR = linear_batches(recording, x_TGK, weight, out_dtype, fewer_than=DENSE_TOKENS)
    operands = gemm_operands(weight, groups)
    recording.call(_Dense(product), x_TGK, *operands, y_TGR)
    return y_TGR


@dataclass(frozen=True)
class _Dense:
    """Fewer tokens than the kernels take are left to another launch."""

    product: W16Product

    def __call__(self, tokens: int, x_TGK: Tensor, *operands: Tensor) -> None:
        """``operands``: data and both scales of the weight, and the result ``[T, G, R]``."""
        gemm = self.product.gemm(tokens)
        if gemm is None:
            return
        *weight, y_TGR = operands
        nothing = [weight[0]] * 4
        x = x_TGK[:tokens]
        if x.shape[1] == 1:
            x = one_group(x[:, 0])
        gemm(x, *weight, *weight, *nothing, y_TGR[:tokens], 0.0, 1)


_PRODUCTS = PrefillProducts(_linear_batches)
linear = _PRODUCTS.linear
grouped_linear = _PRODUCTS.grouped_linear


def linear_rows(
    recording: Recording,
    x: Tensor,
    rows: RowList,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """``dsv4.ops.linear.linear_rows``: matrix by matrix on Blackwell, as ``prefill_rows`` does
    elsewhere.
    """
    is_native = INSTALLED and recording.target.architecture in ARCHITECTURES
    form = _PRODUCTS if is_native else prefill_rows
    return form.linear_rows(recording, x, rows, norm_weight, norm_eps)
