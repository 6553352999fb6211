"""Compiled kernels with an edit of their PTX, executed on small problems."""

from collections.abc import Callable

import numpy as np
import torch

from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.ops.linear.prefill_cutedsl import gemm_operands
from dsv4.weights.quant import QuantFormat
from tests.ops.linear import w16_problems
from tests.ops.linear.compiled import compile_once
from tests.ops.linear.scaled_configurations import MULTIPROCESSORS
from tests.ptx import hopper_problems, scaled_problems
from tests.ptx.edits import Edit
from tests.ptx.planted import WrongValues
from tests.ptx.run import CompiledKernel, run_kernel
from tests.ptx.schedule import Schedule

MXFP4 = QuantFormat.MXFP4
NVFP4 = QuantFormat.NVFP4
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
        kernel = hopper_problems.compiled(problem)
        x, weight, y, expected = hopper_problems.operands(problem)
        run_kernel(edited(kernel, edit), [x, *gemm_operands(weight), y], schedule)
        check(int((y != expected).sum()))

    return run


def scaled_kernel(config: ScaledConfig, packed: bool = False) -> CompiledKernel:
    """``packed``: 4-bit codes are not spread to 8-bit containers, a fault of the kernel itself."""
    from dsv4.ops.linear.cutedsl.blackwell_scaled import ScaledGemm

    class PackedWeights(ScaledGemm):
        def __init__(self, config: ScaledConfig):
            super().__init__(config)
            self.weight_smem_type = self.weight_type

    kernel = PackedWeights if packed else ScaledGemm
    return compile_once(kernel, config, "sm_100a").kernel


def scaled_run(problem: scaled_problems.Problem, packed: bool = False) -> Run:
    """``ScaledGemm`` against the reference from logical codes."""

    def run(edit: Edit, schedule: Schedule) -> None:
        given = scaled_problems.operands(problem)
        if given.row_global is not None:
            # Which NaN a NaN is, is left open.
            given = given._replace(row_global=np.nan_to_num(given.row_global, nan=1))
        results = scaled_problems.outputs(problem)
        arrays = (*given.arguments(problem), *results)
        arguments = [None if array is None else torch.from_numpy(array) for array in arrays]
        y = arguments[-3]
        if problem.config.out_dtype is BF16 and y is not None:
            arguments[-3] = y.view(BF16)
        numbers = (float(scaled_problems.LIMIT), float(scaled_problems.HIDDEN_GLOBAL))
        kernel = edited(scaled_kernel(problem.config, packed), edit)
        # One cluster works on all tiles.
        run_kernel(kernel, [*arguments, *numbers], schedule, problem.config.ctas)
        wanted = scaled_problems.expected(problem, given)
        check(sum(_different(*pair) for pair in zip(results, wanted, strict=True)))

    return run


def _different(found: np.ndarray | None, wanted: np.ndarray | None) -> int:
    if found is None or wanted is None:
        return int(found is not wanted)
    return int((found.view(np.uint8) != wanted.view(np.uint8)).sum())


def w16_run(case: w16_problems.W16Case) -> Run:
    """``BlackwellW16`` on a problem with exact sums."""

    def run(edit: Edit, schedule: Schedule) -> None:
        given = w16_problems.make_operands(case)
        kernel = edited(w16_problems.compiled(case.config), edit)
        run_kernel(kernel, given.arguments, schedule, w16_problems.BLOCKS)
        wanted = given.expected.float().to(given.y.dtype)
        check(int(((given.y != wanted) & ~(given.y.isnan() & wanted.isnan())).sum()))

    return run


def dense(format: QuantFormat, pair: bool, columns: int) -> scaled_problems.Problem:
    """Ragged rows and features, several tiles for each cluster."""
    config = ScaledConfig(format, BF16, False, pair, 128, MULTIPROCESSORS)
    return scaled_problems.Problem(config, config.tile_tokens + 3, 136, columns)


_SORTED = ScaledConfig(QuantFormat.FP8_BLOCK128, None, True, False, 256, MULTIPROCESSORS)
_EXPERTS = scaled_problems.Problem(_SORTED, 0, 128, 160, tiles=((1, 5), (0, 70)), experts=3)
# More K tiles than the kernels have stages and fragments, which are therefore used again.
_LONG = hopper_problems.Problem(MXFP4, BF16, (16, 1, 1), 20, 64, 20 * 64)
_WIDE = hopper_problems.Problem(MXFP4, BF16, (64, 2, 1), 40, 128, 64)
_W16 = w16_problems.W16Case("dense", MXFP4, 40, 192, 14 * 64, tile_tokens=32, sides=1)
_GATHER = w16_problems.W16Case("gate_up", MXFP4, 9, 72, 160)
KERNELS: dict[str, Run] = {
    "hopper": hopper_run(_LONG),
    "two warpgroups": hopper_run(_WIDE),
    "nvfp4": scaled_run(dense(NVFP4, False, 544)),
    "pair": scaled_run(dense(NVFP4, True, 288)),
    "gate_up": scaled_run(_EXPERTS),
    "w16": w16_run(_W16),
    "gather": w16_run(_GATHER),
}
"""Kernels without a fault."""
PACKED = scaled_run(dense(MXFP4, False, 256), packed=True)
"""4-bit weights meet 8-bit activations packed instead of in 8-bit containers."""
