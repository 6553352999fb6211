"""Products for ``BlackwellW16`` in all of its forms: ragged, with poison where nothing may be read
or written, and what their results are.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dsv4.ops.linear.cutedsl.gemm_config import SORTED_TILE, W16Config
from dsv4.ops.linear.prefill_w16 import gemm_operands
from dsv4.ops.moe.sorted_pairs import Cut, Sorted
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes
from dsv4.weights.quantize import quantize
from tests.ops.linear.blackwell_problems import MULTIPROCESSORS
from tests.ops.linear.compiled import compile_once
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4
from tests.ptx.run import CompiledKernel, run_kernel
from tests.ptx.schedule import Schedule, random_schedule

Form = Literal["dense", "down", "gate_up", "shared"]
ARCHITECTURE = "sm_100a"
LIMIT = 3.0
LOG2_E = 1.4426950408889634
# One computes all work tiles, so that its rings go round.
BLOCKS = 1
EXPERTS = 5
PER_TOKEN = 2
# Every weight of an integer problem is a multiple of this; gated ones have small products.
_GATED_UNIT = 2.0**-6


class W16Case(NamedTuple):
    """``tokens`` rows of K = ``columns``, ``features`` rows of each group or expert.

    ``exact``: every sum is exact in float32, in any order.
    """

    form: Form
    format: QuantFormat
    tokens: int
    features: int
    columns: int
    out_dtype: torch.dtype = torch.bfloat16
    groups: int = 1
    tile_tokens: int = 64
    sides: int = 2
    exact: bool = True

    @property
    def name(self) -> str:
        """For the ids of tests."""
        sizes = f"{self.tokens}-{self.features}-{self.columns}-{self.groups}"
        return f"{self.form}-{self.format.value}-{self.tile_tokens}x{self.sides}-{sizes}"

    @property
    def gated(self) -> bool:
        return self.form in ("gate_up", "shared")

    @property
    def sorted(self) -> bool:
        return self.form in ("gate_up", "down")

    @property
    def config(self) -> W16Config:
        """What its kernel is compiled for."""
        dtype = self.out_dtype
        tile = (self.tile_tokens, self.sides, MULTIPROCESSORS)
        return W16Config(self.format, dtype, self.gated, self.sorted, *tile)


class Operands(NamedTuple):
    """``arguments`` of the kernel, ``y`` among them, and the results as float64: NaN where nothing
    may be written.
    """

    arguments: list[Any]
    y: Tensor
    expected: Tensor


def run(case: W16Case, operands: Operands, schedule: Schedule) -> Tensor:
    """The results of the compiled kernel in the machine."""
    run_kernel(compiled(case.config), operands.arguments, schedule, BLOCKS)
    return operands.y


@cache
def compiled(config: W16Config) -> CompiledKernel:
    """The kernel of a configuration."""
    from dsv4.ops.linear.cutedsl.blackwell_w16 import BlackwellW16

    return compile_once(BlackwellW16, config, ARCHITECTURE).kernel


def machine_gemm(config: W16Config, architecture: str) -> Callable[..., object]:
    """Stands for a compiled kernel on a GPU: runs it in the machine."""
    assert architecture == ARCHITECTURE
    return lambda *arguments: run_kernel(compiled(config), arguments, random_schedule(0))


def make_operands(case: W16Case, seed: int = 0) -> Operands:
    """The arguments of a case, poisoned, and its results by float64 products."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.groups * case.features, case.columns)
    if case.sorted:
        shape = (EXPERTS, case.features, case.columns)
    weights = [make_weight(case, shape, generator) for _ in range(2 if case.gated else 1)]
    ids_TP = make_ids(case.tokens, generator)
    pairs = sort_pairs(ids_TP)
    routing = torch.rand(ids_TP.shape, generator=generator)
    rows = ids_TP.numel() if case.form == "down" else case.tokens
    x = make_tokens(case, rows, generator)
    results = ids_TP.numel() if case.sorted else case.tokens
    # Rows of a wider buffer.
    y = torch.full((results, case.groups, case.features + 3), torch.nan, dtype=case.out_dtype)
    y = y[..., : case.features]
    matrices = [gemm_operands(weight, case.groups) for weight in weights]
    nothing = matrices[0][0]
    lists: list[Tensor] = [nothing] * 4
    if case.sorted:
        lists = [pairs.tiles, pairs.tile_count, pairs.slots, nothing]
    if case.form == "gate_up":
        lists[3] = routing.flatten()
    arguments = [x, *matrices[0], *matrices[-1], *lists, y, LIMIT, PER_TOKEN]
    expected = reference(case, x.double(), weights, ids_TP, routing)
    return Operands(arguments, y, expected)


def make_tokens(case: W16Case, rows: int, generator: torch.Generator) -> Tensor:
    """bfloat16 ``[rows, G, K]``, rows at multiples of 16 bytes with NaN between them."""
    width = -(-case.columns // 8) * 8 + 8
    x = torch.full((rows, case.groups, width), torch.nan, dtype=torch.bfloat16)
    x = x[..., : case.columns]
    if case.exact:
        x.copy_(torch.randint(-3, 4, x.shape, generator=generator))
    else:
        x.copy_(torch.randn(x.shape, generator=generator))
    return x


def make_weight(case: W16Case, shape: tuple[int, ...], generator: torch.Generator) -> PackedWeight:
    """Small integers times powers of two, or normal values."""
    format = case.format
    if not case.exact:
        values = torch.randn(shape, generator=generator) * 0.1
        if format is BF16:
            return pack_weight(QuantTensor.dense(values.bfloat16()))
        return pack_weight(quantize(values, format))
    unit = _GATED_UNIT if case.gated else 1.0

    def integers(low: int, high: int, sizes: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator)

    if format is BF16:
        return pack_weight(QuantTensor.dense((integers(-6, 7, shape) * unit).bfloat16()))
    sizes = packed_shapes(format, shape)
    blocks = sizes["block_scale"]
    assert blocks is not None
    total = None
    if format is NVFP4:
        scales = integers(1, 16, blocks).to(torch.float8_e4m3fn)
        total = (integers(3, 9, shape[:-2]) * 0.037 * unit).float()
    else:
        powers = torch.exp2(integers(-2, 3, blocks).float()) * unit
        scales = powers.to(torch.float8_e8m0fnu)
    if format is FP8:
        data = integers(-15, 16, shape).to(torch.float8_e4m3fn)
    else:
        data = integers(0, 256, (*shape[:-1], shape[-1] // 2)).to(torch.uint8)
    return pack_weight(QuantTensor(data, scales, total, format, shape))


def make_ids(tokens: int, generator: torch.Generator) -> Tensor:
    """Experts int64 ``[T, P]``: expert 1 has no pair, expert 2 one, and two ids are no experts."""
    ids_TP = torch.randint(3, EXPERTS, (tokens, PER_TOKEN), generator=generator)
    ids_TP[::7, 0] = 0
    ids_TP[1, 1] = 2
    ids_TP[2, 0] = EXPERTS
    ids_TP[3, 1] = -1
    return ids_TP


def sort_pairs(ids_TP: Tensor) -> Sorted:
    """``dsv4.ops.moe.sorted_pairs.sort_by_expert``, with poison behind the tiles in use."""
    flat = ids_TP.flatten().tolist()
    slots: list[int] = []
    tiles: list[list[int]] = []
    for expert in range(EXPERTS):
        own = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        for begin in range(0, len(own), SORTED_TILE):
            count = min(SORTED_TILE, len(own) - begin)
            tiles.append([expert, len(slots) + begin, count, 0])
        slots += own
    cut = Cut(PER_TOKEN, EXPERTS)
    most = cut.tiling(len(ids_TP)).most
    all_tiles = torch.full((most, 4), 1 << 20, dtype=torch.int32)
    all_tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
    all_slots = torch.full((len(flat),), 1 << 20, dtype=torch.int32)
    all_slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    tile_count = torch.tensor([len(tiles)], dtype=torch.int32)
    return Sorted(all_slots, all_tiles, tile_count, cut)


def reference(
    case: W16Case,
    x: Tensor,
    weights: list[PackedWeight],
    ids_TP: Tensor,
    routing: Tensor,
) -> Tensor:
    """float64 results ``[rows, G, R]``."""
    if case.form == "dense":
        return expected_products(case, x, weights[0])
    if case.form == "shared":
        first = torch.zeros(len(x), dtype=torch.int64)
        gate, up = (products(case, x, weight, first) for weight in weights)
        return gated(case, gate, up, torch.ones(()))
    slots = sort_pairs(ids_TP).slots
    chosen = ids_TP.flatten()
    slots = slots[: int(((chosen >= 0) & (chosen < EXPERTS)).sum())].long()
    experts = chosen[slots]
    expected = torch.full((ids_TP.numel(), 1, case.features), torch.nan, dtype=torch.float64)
    if case.form == "down":
        expected[slots] = products(case, x[: len(slots)], weights[0], experts)
        return expected
    tokens = x[slots // PER_TOKEN]
    gate, up = (products(case, tokens, weight, experts) for weight in weights)
    weight = routing.flatten()[slots, None, None]
    expected[: len(slots)] = gated(case, gate, up, weight)
    return expected


def expected_products(case: W16Case, x: Tensor, weight: PackedWeight) -> Tensor:
    """``[T, G, R]`` by one matrix of all groups."""
    return products(case, x, weight, torch.zeros(len(x), dtype=torch.int64))


def products(case: W16Case, x: Tensor, weight: PackedWeight, matrices: Tensor) -> Tensor:
    """``[rows, G, R]``: row i by matrix ``matrices[i]`` of a stack. Exact sums are rounded to
    float32, and so is their product with the global scale.
    """
    total = weight.global_scale
    stack = weight.shape[0] if len(weight.shape) == 3 else 1
    if total is not None:
        weight = replace(weight, global_scale=torch.ones_like(total))
    values = weight.dequantize().double().view(stack, case.groups, case.features, case.columns)
    sums = torch.einsum("tgk,tgrk->tgr", x, values[matrices])
    if total is None:
        return sums
    factor = total.view(-1)[matrices, None, None]
    return (sums.float() * factor).double() if case.exact else sums * factor.double()


def gated(case: W16Case, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) · weight; of exact sums in the float32 operations
    of the kernel.
    """
    gate = gate.clamp(max=LIMIT)
    up = up.clamp(-LIMIT, LIMIT)
    if not case.exact:
        return gate / (1 + torch.exp(-gate)) * up * weight
    power = torch.exp2((gate.float() * -LOG2_E).double()).float()
    return (gate.float() / (1 + power) * up.float() * weight).double()


FORMATS = (NVFP4, MXFP4, FP8, BF16)
