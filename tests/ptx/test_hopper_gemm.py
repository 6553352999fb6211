"""The compiled HopperGemm in the machine: twenty problems with exact sums, and all schedules."""

import pytest
import torch

from dsv4.ops.linear.prefill_cutedsl import INSTALLED, gemm_operands
from tests.ptx.hopper_problems import PROBLEMS, Problem, compiled, operands
from tests.ptx.run import run_kernel
from tests.ptx.schedule import SCHEDULES, Schedule, random_schedule

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")
FAST = (1,)


def assert_exact(problem: Problem, schedule: Schedule) -> None:
    kernel = compiled(problem)
    x, weight, y, expected = operands(problem)
    run_kernel(kernel, [x, *gemm_operands(weight), y], schedule)
    assert torch.equal(y, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "index",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in range(len(PROBLEMS))],
    ids=[problem.name for problem in PROBLEMS],
)
def test_equals_the_exact_product(index: int) -> None:
    assert_exact(PROBLEMS[index], random_schedule(index))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_same(name: str) -> None:
    assert_exact(PROBLEMS[4], SCHEDULES[name])
