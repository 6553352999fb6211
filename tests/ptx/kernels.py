"""Compiled kernels with an edit of their PTX, executed on small problems."""

from collections.abc import Callable

import torch

from dsv4.ops.linear.prefill_cutedsl import gemm_operands
from dsv4.weights.quant import QuantFormat
from tests.ops.linear import w16_problems
from tests.ptx import hopper_problems
from tests.ptx.edits import Edit
from tests.ptx.planted import WrongValues
from tests.ptx.run import CompiledKernel, run_kernel
from tests.ptx.schedule import Schedule

MXFP4 = QuantFormat.MXFP4
BF16 = torch.bfloat16
Run = Callable[[Edit, Schedule], None]


def check(wrong: int) -> None:
    """Raises ``WrongValues`` where there are some."""
    if wrong:
        raise WrongValues(f"{wrong} values")


def edited(kernel: CompiledKernel, edit: Edit) -> CompiledKernel:
    """The kernel with other PTX; the host half stays."""
    return kernel._replace(ptx=edit(kernel.ptx))


def hopper_run(problem: hopper_problems.Problem) -> Run:
    """``HopperGemm`` on a problem with exact sums."""

    def run(edit: Edit, schedule: Schedule) -> None:
        kernel = CompiledKernel.of(hopper_problems.compile_problem(problem[:3]))
        x, weight, y, expected = hopper_problems.operands(problem)
        run_kernel(edited(kernel, edit), [x, *gemm_operands(weight), y], schedule)
        check(int((y != expected).sum()))

    return run


def w16_run(case: w16_problems.W16Case) -> Run:
    """``BlackwellW16`` on a problem with exact sums."""

    def run(edit: Edit, schedule: Schedule) -> None:
        given = w16_problems.make_operands(case)
        run_kernel(edited(w16_problems.compiled(case.config), edit), given.arguments, schedule)
        wanted = given.expected.float().to(given.y.dtype)
        check(int(((given.y != wanted) & ~(given.y.isnan() & wanted.isnan())).sum()))

    return run


# More K tiles than the kernels have stages and fragments, which are therefore used again.
_LONG = hopper_problems.Problem(MXFP4, BF16, (16, 1, 1), 20, 64, 20 * 64)
_WIDE = hopper_problems.Problem(MXFP4, BF16, (64, 2, 1), 40, 128, 64)
_W16 = w16_problems.W16Case("dense", MXFP4, 40, 192, 14 * 64, tile_tokens=32, sides=1)
_GATHER = w16_problems.W16Case("gate_up", MXFP4, 9, 72, 160)
KERNELS: dict[str, Run] = {
    "hopper": hopper_run(_LONG),
    "two warpgroups": hopper_run(_WIDE),
    "w16": w16_run(_W16),
    "gather": w16_run(_GATHER),
}
"""Kernels without a fault."""
