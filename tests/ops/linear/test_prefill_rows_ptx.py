"""Products of a list in a prompt, executed on the CPU: matrices of one and of two formats with
results of both types, in short and in long steps, against float64 and bit for bit against the
products of each matrix alone.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import prefill, prefill_long, prefill_rows
from dsv4.ops.linear.row_list import pack_rows
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ops.cases import assert_rounded_once, normal
from tests.ops.executed import execute
from tests.ops.linear.test_prefill_linear_ptx import (
    BF16,
    CPU,
    F32,
    FP8,
    MXFP4,
    NVFP4,
    ROUNDED,
    SUMMED,
    splits_of,
    weight_of,
)
from tests.ops.recorded import shape_at
from tests.ptx.nvrtc import SourceEdit

pytestmark = pytest.mark.slow

# (rows, format, dtype of the product).
Matrices = list[tuple[int, QuantFormat, torch.dtype]]
# A block has 256 rows or 128, a warpgroup 64 of a side.
OF_ONE_FORMAT: Matrices = [(64, FP8, ROUNDED), (192, FP8, F32), (128, FP8, ROUNDED)]
OF_TWO_FORMATS: Matrices = [(64, BF16, ROUNDED), (128, NVFP4, F32), (64, NVFP4, ROUNDED)]
OF_THREE_FORMATS: Matrices = [(64, BF16, F32), (64, MXFP4, ROUNDED), (128, FP8, ROUNDED)]
FAULTS = {
    "a row of scales has 128 rows": (
        OF_ONE_FORMAT,
        SourceEdit("prefill_tiles.cuh", "tile / (LIST ? 4 : 8)", "tile / 8"),
    ),
    "all matrices have the scale of the first": (
        OF_TWO_FORMATS,
        SourceEdit("prefill_tiles.cuh", "LIST ? matrix_of(", "LIST ? 0 & matrix_of("),
    ),
    "a second format begins with the first tile": (
        OF_TWO_FORMATS,
        SourceEdit("prefill_results.cuh", "(matrix.x - g.list.first_tile)", "matrix.x"),
    ),
    "products lie where those of fewer tokens would": (
        OF_ONE_FORMAT,
        SourceEdit("prefill_results.cuh", "(int64)g.list.capacity", "(int64)g.tokens"),
    ),
}


class Step(NamedTuple):
    """So many tokens of a recording for ``most``, on so many multiprocessors."""

    architecture: str
    tokens: int
    most: int
    columns: int
    multiprocessors: int = 2

    def recording(self) -> Recording:
        return Recording(Target(CPU, self.architecture, self.multiprocessors), self.most)

    @property
    def x_TK(self) -> Tensor:
        return normal(self.most, self.columns, seed=1, dtype=ROUNDED)

    def products(self, matrices: Matrices, edit: SourceEdit | None = None) -> list[Tensor]:
        """By the launches of the list."""
        recording = self.recording()
        rows = pack_rows(stored(matrices, self.columns), [dtype for *_, dtype in matrices])
        products = prefill_rows.linear_rows(recording, self.x_TK, rows)
        real = execute(recording, self.tokens, edit)
        found = [real(product) for product in products]
        for product in found:
            assert product[self.tokens :].isnan().all(), "other tokens are not written"
        return [product[: self.tokens] for product in found]

    def alone(self, matrices: Matrices) -> list[Tensor]:
        """By a launch for each matrix."""
        found = []
        for weight, (*_, dtype) in zip(stored(matrices, self.columns), matrices, strict=True):
            recording = self.recording()
            form = prefill_long if self.tokens > 128 else prefill
            y = form.linear(recording, self.x_TK, pack_weight(weight), dtype)
            found.append(execute(recording, self.tokens)(y)[: self.tokens])
        return found

    def assert_exact(self, matrices: Matrices, products: list[Tensor]) -> None:
        x = self.x_TK[: self.tokens].double()
        for weight, product in zip(stored(matrices, self.columns), products, strict=True):
            exact = x @ weight.dequantize().double().T
            assert_rounded_once(product, exact, SUMMED)


def stored(matrices: Matrices, columns: int) -> list[QuantTensor]:
    """No two of a format have the same scales."""
    weights = []
    for factor, (rows, format, _) in enumerate(matrices, start=1):
        weight = weight_of(format, rows, columns)
        if weight.global_scale is not None:
            weight = replace(weight, global_scale=weight.global_scale * factor)
        elif format is FP8:
            assert weight.block_scale is not None
            weight = replace(weight, block_scale=weight.block_scale * factor)
        weights.append(weight)
    return weights


def names(recording: Recording, tokens: int) -> list[str]:
    launches = [item for item in recording.items if isinstance(item, Launch)]
    return [one.signature.kernel for one in launches if shape_at(one, tokens) is not None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("matrices", [OF_ONE_FORMAT, OF_TWO_FORMATS, OF_THREE_FORMATS])
def test_products_are_those_of_each_matrix_alone(architecture: str, matrices: Matrices) -> None:
    step = Step(architecture, 21, 40, 96)
    found = step.products(matrices)
    step.assert_exact(matrices, found)
    for one, other in zip(found, step.alone(matrices), strict=True):
        assert torch.equal(one, other)


def test_blocks_of_all_matrices_share_k() -> None:
    step = Step("sm_90a", 9, 9, 576, multiprocessors=5)
    step.assert_exact(OF_ONE_FORMAT, step.products(OF_ONE_FORMAT))
    recording = step.recording()
    rows = pack_rows(stored(OF_ONE_FORMAT, 576), [dtype for *_, dtype in OF_ONE_FORMAT])
    prefill_rows.linear_rows(recording, step.x_TK, rows)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    assert splits_of(launch, 9) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("matrices", [OF_ONE_FORMAT, OF_TWO_FORMATS])
@pytest.mark.parametrize(("tokens", "multiprocessors"), [(150, 8), (260, 2)])
def test_long_steps(matrices: Matrices, tokens: int, multiprocessors: int) -> None:
    """With tiles of 128 tokens and of 256."""
    step = Step("sm_90a", tokens, 270, 160, multiprocessors)
    found = step.products(matrices)
    step.assert_exact(matrices, found)
    for one, other in zip(found, step.alone(matrices), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    matrices, edit = FAULTS[fault]
    step = Step("sm_90a", 21, 40, 96)
    with pytest.raises(AssertionError):
        step.assert_exact(matrices, step.products(matrices, edit))


def test_what_is_launched() -> None:
    step = Step("sm_90a", 0, 600, 256, multiprocessors=132)
    recording = step.recording()
    rows = pack_rows(stored(OF_TWO_FORMATS, 256), [dtype for *_, dtype in OF_TWO_FORMATS])
    products = prefill_rows.linear_rows(recording, step.x_TK, rows)
    assert [product.shape for product in products] == [(600, 64), (600, 128), (600, 64)]
    assert [product.dtype for product in products] == [ROUNDED, F32, ROUNDED]
    # One for each format.
    assert names(recording, 128) == ["prefill_rows"] * 2
    assert names(recording, 129) == ["long_rows"] * 2


def test_rows_of_x_that_are_no_whole_pieces_are_copied_first() -> None:
    step = Step("sm_90a", 0, 600, 36, multiprocessors=132)
    recording = step.recording()
    weights = [weight_of(BF16, count, 36) for count in (64, 128)]
    prefill_rows.linear_rows(recording, step.x_TK, pack_rows(weights, [None, F32]))
    assert len(recording.items) == 3
    assert names(recording, 600) == ["long_rows"]


@pytest.mark.parametrize(
    "rows", [[128], [64, 40], [512, 64]], ids=["one matrix", "padded rows", "many rows"]
)
def test_lists_that_are_recorded_matrix_by_matrix(rows: list[int]) -> None:
    step = Step("sm_90a", 0, 64, 96)
    recording = step.recording()
    weights = [weight_of(NVFP4, count, 96) for count in rows]
    prefill_rows.linear_rows(recording, step.x_TK, pack_rows(weights, [None] * len(rows)))
    assert names(recording, 64) == ["prefill_linear"] * len(rows)


def test_another_number_of_tokens_than_recorded_is_refused() -> None:
    step = Step("sm_90a", 0, 64, 96)
    rows = pack_rows(stored(OF_ONE_FORMAT, 96), [dtype for *_, dtype in OF_ONE_FORMAT])
    with pytest.raises(ValueError, match="^x: found 63 tokens, expected 64 of the recording"):
        prefill_rows.linear_rows(step.recording(), step.x_TK[:63], rows)
