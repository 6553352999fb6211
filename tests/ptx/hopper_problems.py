"""Products for ``HopperGemm`` whose sums are exact in float32: twenty, over all four formats."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ops.linear.compiled import compile_once
from tests.ptx.run import CompiledKernel

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
MULTIPROCESSORS = 132


class Problem(NamedTuple):
    """``tokens`` rows of ``groups`` · ``columns`` times a weight of ``features`` rows.

    ``tile``: tokens per tile, warpgroups and cluster of the kernel.
    """

    format: QuantFormat
    out_dtype: torch.dtype
    tile: tuple[int, int, int]
    tokens: int
    features: int
    columns: int
    groups: int = 1

    @property
    def name(self) -> str:
        """For the ids of tests."""
        tile = "x".join(map(str, self.tile))
        sizes = f"{self.tokens}-{self.features}-{self.columns}-{self.groups}"
        return f"{self.format.value}-{tile}-{sizes}"


_SHORT = torch.bfloat16
_LONG = torch.float32
PROBLEMS = (
    Problem(BF16, _SHORT, (16, 1, 1), 20, 64, 128),
    Problem(NVFP4, _SHORT, (16, 1, 1), 7, 128, 192),
    Problem(MXFP4, _SHORT, (16, 1, 1), 16, 64, 64),
    Problem(FP8, _SHORT, (16, 1, 1), 33, 192, 256),
    Problem(NVFP4, _LONG, (32, 1, 1), 40, 64, 320),
    Problem(BF16, _LONG, (32, 1, 1), 31, 128, 64),
    Problem(MXFP4, _LONG, (32, 1, 1), 65, 64, 256),
    Problem(FP8, _LONG, (32, 1, 1), 12, 128, 640),
    Problem(NVFP4, _SHORT, (64, 1, 1), 70, 192, 256),
    Problem(MXFP4, _SHORT, (64, 2, 1), 64, 320, 128),
    Problem(FP8, _SHORT, (64, 2, 1), 65, 256, 384),
    Problem(BF16, _SHORT, (64, 1, 1), 129, 64, 192, 1),
    Problem(NVFP4, _SHORT, (128, 2, 1), 150, 128, 128),
    Problem(FP8, _SHORT, (128, 2, 1), 128, 64, 128),
    Problem(BF16, _SHORT, (128, 2, 2), 100, 256, 64),
    Problem(MXFP4, _SHORT, (128, 2, 1), 140, 192, 192),
    Problem(NVFP4, _SHORT, (256, 2, 2), 270, 512, 128),
    Problem(BF16, _LONG, (32, 1, 1), 24, 256, 128, 2),
    Problem(NVFP4, _SHORT, (64, 2, 1), 30, 512, 64, 4),
    Problem(FP8, _SHORT, (16, 1, 1), 9, 128, 192, 2),
)


class Operands(NamedTuple):
    """Arguments of the kernel (``y`` poisoned) and the result it must give."""

    x: Tensor
    weight: PackedWeight
    y: Tensor
    expected: Tensor


def operands(problem: Problem) -> Operands:
    """x bf16 ``[T, G, K]`` of small integers and a weight of small multiples of powers of two.

    Every sum of products is an integer times a power of two below 2^24, so that the order of the
    additions does not matter. ``expected`` is the sum, times NVFP4's global scale, rounded once to
    float32 and once to ``out_dtype``.
    """
    generator = torch.Generator().manual_seed(problem.tokens + problem.columns)
    x = torch.randint(-3, 4, (problem.tokens, problem.groups, problem.columns), generator=generator)
    stored = _weight(problem, generator)
    rows = (problem.features, problem.columns)
    codes = _codes(stored).view(problem.groups, -1, problem.columns)
    sums = torch.einsum("tgk,grk->tgr", x.double(), codes).flatten(1)
    expected = sums.float()
    if stored.global_scale is not None:
        expected = expected * stored.global_scale
    y = torch.empty((problem.tokens, rows[0]), dtype=problem.out_dtype)
    y.view(torch.uint8).fill_(0xFF)
    return Operands(x.bfloat16(), pack_weight(stored), y, expected.to(problem.out_dtype))


def _weight(problem: Problem, generator: torch.Generator) -> QuantTensor:
    shape = (problem.features, problem.columns)

    def integers(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator)

    if problem.format is BF16:
        return QuantTensor.dense(integers(-6, 7, *shape).bfloat16())
    if problem.format is FP8:
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        # Exponents of E8M0: 2^-2 to 2^2.
        scales = integers(125, 130, *blocks).to(torch.uint8).view(torch.float8_e8m0fnu)
        data = integers(-15, 16, *shape).to(torch.float8_e4m3fn)
        return QuantTensor(data, scales, None, FP8, shape)
    codes = integers(0, 256, shape[0], shape[1] // 2).to(torch.uint8)
    if problem.format is MXFP4:
        scales = integers(125, 130, shape[0], shape[1] // 32).to(torch.uint8)
        return QuantTensor(codes, scales.view(torch.float8_e8m0fnu), None, MXFP4, shape)
    scales = integers(1, 16, shape[0], shape[1] // 16).to(torch.float8_e4m3fn)
    return QuantTensor(codes, scales, torch.tensor(0.37, dtype=torch.float32), NVFP4, shape)


def _codes(weight: QuantTensor) -> Tensor:
    """float64 values without the global scale."""
    one = None if weight.global_scale is None else torch.ones((), dtype=torch.float32)
    bare = QuantTensor(weight.data, weight.block_scale, one, weight.format, weight.shape)
    return bare.dequantize().double()


def config_of(problem: Problem) -> Any:
    """The ``GemmConfig`` of its kernel."""
    from dsv4.ops.linear.cutedsl import jit
    from dsv4.ops.linear.cutedsl.hopper_gemm import GemmConfig

    dtype = jit.DTYPES[problem.out_dtype]
    return GemmConfig(problem.format, dtype, *problem.tile, MULTIPROCESSORS)


def compiled(problem: Problem) -> CompiledKernel:
    """Its kernel for the machine."""
    from dsv4.ops.linear.cutedsl.hopper_gemm import HopperGemm

    return compile_once(HopperGemm, config_of(problem), "sm_90a").kernel
