"""The products of a step of many tokens, whichever kernel computes them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.linear import RowList
from dsv4.ops.linear.aligned import aligned_rows, copy_rows, without_gaps
from dsv4.ops.linear.checks import check_grouped, check_linear, check_norm
from dsv4.ops.linear.row_list import packed_rows
from dsv4.ops.norm.cuda import rms_norm
from dsv4.weights.packed import TILE_ROWS, PackedWeight
from dsv4.weights.quant import Weight

# x ``[T, G, K]`` times a packed weight: ``[T, G, R]``, R a multiple of 16 unless G is 1. Operands
# are already checked.
Batches = Callable[[Recording, Tensor, PackedWeight, torch.dtype], Tensor]
# ``linear`` of one of these, or another that takes the same: x, a weight and the dtype of y.
RecordLinear = Callable[[Recording, Tensor, Weight, torch.dtype], Tensor]


@dataclass(frozen=True)
class PrefillProducts:
    """The products by one implementation of ``batches``. T is the recording's number of tokens."""

    batches: Batches

    def linear(
        self, recording: Recording, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """y = x · Wᵀ for x bfloat16 ``[T, K]`` and packed W ``[N, K]``: bfloat16 or float32
        ``[T, N]``.

        Exact products of the stored weights (NVFP4: before its global scale) with x, float32 sums,
        one rounding (``tests/ops/linear/test_prefill_linear.py``). Raises ``ValueError`` naming the
        argument for anything else.
        """
        dtype = out_dtype or torch.bfloat16
        packed = check_linear(x, weight, dtype)
        y_TN = self.batches(recording, x.unsqueeze(1), packed, dtype)[:, 0]
        # Kernels that read float32 products take rows that lie apart.
        return y_TN if dtype == torch.float32 else without_gaps(recording, y_TN)

    def grouped_linear(self, recording: Recording, x_TGK: Tensor, weight: Weight) -> Tensor:
        """Group g of x ``[T, G, K]`` times rows g·R … g·R + R − 1 of W ``[G·R, K]``: ``[T, G, R]``.

        All bfloat16. Raises ``ValueError`` as ``dsv4.ops.linear.grouped_linear`` does.
        """
        packed = check_grouped(x_TGK, weight)
        tokens, groups, _ = x_TGK.shape
        rows = packed.shape[0] // groups
        if rows % TILE_ROWS == 0 or groups == 1:
            return self.batches(recording, x_TGK, packed, torch.bfloat16)
        # Row tiles would straddle groups: every group by all rows, of which its own are kept. Only
        # tiny models have such groups.
        y_TGR = recording.empty((tokens, groups, rows), torch.bfloat16)
        for group in range(groups):
            product = self.linear(recording, x_TGK[:, group], packed, torch.bfloat16)
            own = product[:, group * rows : (group + 1) * rows]
            recording.call(copy_rows, y_TGR[:, group], own)
        return y_TGR

    def linear_rows(
        self,
        recording: Recording,
        x: Tensor,
        rows: RowList,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> tuple[Tensor, ...]:
        """``linear`` of one x ``[T, K]`` with every matrix: see ``dsv4.ops.linear.linear_rows``.

        The norm is a launch of its own, and every product is one with a buffer of its own.
        """
        x = normalised(recording, x, rows, norm_weight, norm_eps)
        packed = packed_rows(rows)
        pairs = zip(packed.weights, packed.dtypes, strict=True)
        return tuple([self.linear(recording, x, weight, dtype) for weight, dtype in pairs])


def normalised(
    recording: Recording, x: Tensor, rows: RowList, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    """x ``[T, K]``, checked, its norm if there is a weight for one, in rows that kernels read."""
    packed = packed_rows(rows)
    packed.check(x)
    check_norm(norm_weight, packed.width)
    if norm_weight is not None:
        x = rms_norm(recording, x, norm_weight, norm_eps)
    return aligned_rows(recording, x)
