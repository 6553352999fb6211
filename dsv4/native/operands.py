"""Random operands of prefill products, packed as a table wants them: for checks and benchmarks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsv4.native.random_weights import RandomWeights
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.bench import LIMIT, PER_TOKEN
from dsv4.ops.router import Router
from dsv4.ops.tables import Table
from dsv4.weights.quant import QuantFormat, QuantTensor

_ROUTED_SCALING = 1.5


class Product(NamedTuple):
    """A product of ``tokens`` tokens: ``op`` of a table with ``sizes``.

    ``linear``: rows and columns of the weight. ``grouped_linear``: groups, rows and columns of
    each. ``moe``: width, inner width and number of experts of this format; ``shared``: the format
    of the shared one. ``disguised``: NVFP4 weights that are MXFP4 in disguise.
    """

    op: str
    format: QuantFormat
    tokens: int
    sizes: tuple[int, ...]
    disguised: bool = False
    shared: QuantFormat = QuantFormat.FP8_BLOCK128

    @property
    def name(self) -> str:
        """As a row of a table shows it."""
        sizes = "x".join(map(str, self.sizes))
        disguise = " in disguise" if self.disguised else ""
        is_other = self.shared is not QuantFormat.FP8_BLOCK128
        shared = f", shared {self.shared.value}" if is_other else ""
        return f"{self.op} {self.format.value}{disguise} {sizes} T={self.tokens}{shared}"

    @property
    def stored_shapes(self) -> list[tuple[QuantFormat, tuple[int, ...]]]:
        """Format and shape of every weight."""
        if self.op == "linear":
            return [(self.format, self.sizes)]
        if self.op == "grouped_linear":
            groups, rows, columns = self.sizes
            return [(self.format, (groups * rows, columns))]
        width, inner, count = self.sizes
        matrices = ((inner, width), (width, inner), (inner, width))
        routed = [(self.format, (count, *shape)) for shape in matrices]
        shared = [(self.shared, shape) for shape in matrices]
        return [*routed, *shared, (QuantFormat.BF16, (count, width))]

    @property
    def values(self) -> int:
        """Numbers of x and of the result."""
        if self.op == "moe":
            return 2 * self.tokens * self.sizes[0]
        *groups, rows, columns = self.sizes
        return self.tokens * math.prod(groups) * (rows + columns)

    @property
    def flops(self) -> int:
        """Useful ones, 2 per multiply-add."""
        if self.op != "moe":
            return 2 * self.tokens * math.prod(self.sizes)
        width, inner, count = self.sizes
        return 2 * self.tokens * width * (3 * inner * (min(PER_TOKEN, count) + 1) + count)

    def operands(self, table: Table, device: torch.device) -> tuple[Any, ...]:
        """The arguments of the op, the same values every time."""
        random = RandomWeights(device)
        pack = table.packing.pack_weight
        if self.op != "moe":
            groups = self.sizes[:-2]
            ((format, shape),) = self.stored_shapes
            weight = pack(random.weight(format, *shape, disguised=self.disguised))
            return random.rows(self.tokens, *groups, self.sizes[-1]), weight
        width, _, count = self.sizes
        weights = [
            random.weight(format, *shape, disguised=self.disguised)
            for format, shape in self.stored_shapes
        ]
        experts, shared = (_packed_experts(table, part) for part in (weights[:3], weights[3:6]))
        bias_X = torch.zeros(count, dtype=torch.float32, device=device)
        per_token = min(PER_TOKEN, count)
        router = Router(pack(weights[6]), bias_X, False, per_token, _ROUTED_SCALING)
        tokens_T = torch.zeros(self.tokens, dtype=torch.int64, device=device)
        x_TE = random.rows(self.tokens, width)
        return x_TE, tokens_T, router, experts, shared, LIMIT


def _packed_experts(table: Table, weights: Sequence[QuantTensor]) -> ExpertWeights:
    packing = table.packing
    if packing.pack_experts is None:
        return ExpertWeights(*map(packing.pack_weight, weights))
    return packing.pack_experts(*weights)
