"""Two products as one launch on a GPU: the bits of two launches, on real and small shapes."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear.bench import random_weight
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.linear.pairs import in_two_launches, output_projection

pytestmark = pytest.mark.gpu

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(
    "formats", [(FP8, FP8), (NVFP4, NVFP4), (MXFP4, FP8), (BF16, BF16)], ids=str
)
@pytest.mark.parametrize(
    ("groups", "columns", "rows", "outputs"),
    [(8, 4096, 1024, 4096), (16, 4096, 1024, 7168), (4, 4096, 1024, 4096), (2, 192, 48, 40)],
    ids=str,
)
def test_the_bits_are_those_of_two_launches(
    groups: int, columns: int, rows: int, outputs: int, formats: tuple[QuantFormat, QuantFormat]
) -> None:
    """Launch after launch, other inputs every time, in memory that was NaN."""
    wo_a = pack_weight(random_weight(groups * rows, columns, formats[0]))
    wo_b = pack_weight(random_weight(outputs, groups * rows, formats[1]))
    two = immediately(in_two_launches)
    for tokens in (1, 2):
        x = normal(tokens, groups, columns)
        one = PreparedOp(output_projection, x, wo_a, wo_b)
        for _ in range(20):
            x.copy_(normal(tokens, groups, columns))
            poison(1 << 20)
            for found, expected in zip(one.run(), two(x, wo_a, wo_b), strict=True):
                assert torch.isfinite(expected).all()
                assert torch.equal(found, expected)


def test_replay_and_synchronisation() -> None:
    wo_a = pack_weight(random_weight(8 * 1024, 4096, FP8))
    wo_b = pack_weight(random_weight(4096, 8 * 1024, FP8))
    one = PreparedOp(output_projection, normal(1, 8, 4096), wo_a, wo_b)
    assert_replay_is_eager(one.run)
    assert_no_synchronisation(one.run)


def test_ten_thousand_launches() -> None:
    """Behind each other and without a pause: no word of another launch is taken for one of this."""
    wo_a = pack_weight(random_weight(8 * 1024, 4096, FP8))
    wo_b = pack_weight(random_weight(4096, 8 * 1024, FP8))
    inputs = [normal(1, 8, 4096) for _ in range(4)]
    x = normal(1, 8, 4096)
    one = PreparedOp(output_projection, x, wo_a, wo_b)
    two = immediately(in_two_launches)
    expected = torch.stack([two(given, wo_a, wo_b)[1] for given in inputs])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in range(10_000):
        x.copy_(inputs[index % 4])
        _, z_TN = one.run()
        wrong += (z_TN != expected[index % 4]).any()
    assert int(wrong) == 0
