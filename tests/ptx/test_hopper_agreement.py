"""HopperGemm on the GPU and in the machine: equal bits."""

import pytest
import torch

from dsv4.ops.linear.prefill_cutedsl import INSTALLED, gemm_operands
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ptx.hopper_problems import PROBLEMS, Problem, compiled, config_of, operands
from tests.ptx.run import run_kernel
from tests.ptx.schedule import random_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("HopperGemm runs on Hopper only")


def on_the_gpu(
    problem: Problem, x: torch.Tensor, weight: PackedWeight, y: torch.Tensor
) -> torch.Tensor:
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.hopper_gemm import HopperGemm

    result = y.cuda()
    jit.compile_kernel(HopperGemm, config_of(problem), "sm_90a")(
        x.cuda(), *(part.cuda() for part in gemm_operands(weight)), result
    )
    torch.cuda.synchronize()
    return result.cpu()


def in_the_machine(
    problem: Problem, x: torch.Tensor, weight: PackedWeight, y: torch.Tensor
) -> torch.Tensor:
    result = y.clone()
    schedule = random_schedule(PROBLEMS.index(problem))
    run_kernel(compiled(problem), [x, *gemm_operands(weight), result], schedule)
    return result


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


@pytest.mark.parametrize("problem", PROBLEMS, ids=[problem.name for problem in PROBLEMS])
def test_integers(problem: Problem) -> None:
    x, weight, y, expected = operands(problem)
    found = on_the_gpu(problem, x, weight, y)
    assert torch.equal(bits(found), bits(in_the_machine(problem, x, weight, y)))
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("index", [4, 5, 6, 7])
def test_sums_that_are_rounded(index: int) -> None:
    """Random numbers, float32 results: every cut of the tensor core shows."""
    problem = PROBLEMS[index]
    torch.manual_seed(index)
    x = torch.randn(problem.tokens, problem.groups, problem.columns).bfloat16()
    values = torch.randn(problem.features, problem.columns)
    dense = problem.format is QuantFormat.BF16
    stored = QuantTensor.dense(values.bfloat16()) if dense else quantize(values, problem.format)
    weight = pack_weight(stored)
    y = torch.empty((problem.tokens, problem.features), dtype=problem.out_dtype)
    found = on_the_gpu(problem, x, weight, y)
    assert torch.equal(bits(found), bits(in_the_machine(problem, x, weight, y)))
