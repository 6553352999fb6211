"""CUDA C++ kernels in the machine: the quantisers' sm_100a build against the torch ops."""

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.ops.quantize_activations import ActivationFormat, cuda, quantize_rows
from tests.ops.quantize_activations.values import swizzled
from tests.ptx.cuda_source import run_op

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("format", list(ActivationFormat))
def test_quantised_rows_are_those_of_torch(format: ActivationFormat, architecture: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 264) * torch.logspace(-6, 3, 264)).bfloat16()
    x[1] = 0

    def op(recording: Recording) -> list[torch.Tensor]:
        rows = cuda.quantize_rows(recording, x, format)
        return [part for part in (rows.codes, rows.scales, rows.global_scale) if part is not None]

    found = run_op(op, 5, architecture)
    expected = [part for part in swizzled(quantize_rows(x, format)) if part is not None]
    for name, a, b in zip(("codes", "scales", "global scale"), found, expected, strict=False):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
