"""Which kernel a product of quantised activations takes, or why none does."""

import pytest
import torch

from dsv4.ops.linear.cutedsl.gemm_config import Rejected
from dsv4.ops.linear.cutedsl.scaled_config import ScaledProblem, scaled_config
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.scaled_configurations import FORMATS, MULTIPROCESSORS, configurations


def test_a_layer_takes_every_kind_of_kernel() -> None:
    roles = {(c.format, c.gated, c.sorted, c.pair) for c in configurations()}
    assert len(roles) == len(FORMATS) * 2 * 2 * 2


@pytest.mark.parametrize(
    ("problem", "architecture", "reason"),
    [
        (ScaledProblem(QuantFormat.MXFP4, None, 64, 128, 128), "sm_90a", "sm_90a has no tcgen05"),
        (
            ScaledProblem(QuantFormat.BF16, None, 64, 128, 128),
            "sm_100a",
            "no tensor core reads bf16 with block scales",
        ),
        (
            ScaledProblem(QuantFormat.MXFP4, torch.bfloat16, 64, 100, 192, groups=2),
            "sm_103a",
            "groups of 192 columns share k tiles of 128, groups of 100 rows share tiles of 128, "
            "100 features are no multiple of 8",
        ),
        (
            ScaledProblem(QuantFormat.NVFP4, torch.bfloat16, 64, 128, 256, groups=2),
            "sm_100a",
            "groups share the global scale of a row",
        ),
        (
            ScaledProblem(QuantFormat.NVFP4, None, 64, 192, 256),
            "sm_100a",
            "192 hidden columns are no multiple of 128",
        ),
    ],
)
def test_what_does_not_fit_says_why(problem: ScaledProblem, architecture: str, reason: str) -> None:
    found = scaled_config(problem, architecture, MULTIPROCESSORS)
    assert isinstance(found, Rejected)
    assert str(found) == reason
