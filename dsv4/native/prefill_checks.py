"""The checks of native prefill products: every format on small ragged shapes and on those of the
published models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.launch.items import Item, Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.native.check import Check
from dsv4.native.difference import MIXTURE, PRODUCT, REQUANTISED, difference, mixture_difference
from dsv4.native.operands import Product
from dsv4.ops.immediate import ops_of
from dsv4.ops.linear.bench_prefill import DENSE
from dsv4.ops.moe import Mixture
from dsv4.ops.moe.bench import GEOMETRIES
from dsv4.ops.tables import RecordedTable, Table
from dsv4.weights.quant import QuantFormat

# (tokens, rows, columns) whose last tiles are not full.
SMALL = ((130, 192, 384), (300, 384, 128), (257, 64, 1024))
# A chunk of a prompt, and what is left of one.
REAL_TOKENS = (300, 4096)
# o_a: groups, rows and columns of one.
GROUPED = ((8, 1024, 4096), (16, 1024, 4096))
_SMALL_GROUPED = (2, 128, 256)
# Experts of the real widths: as few as keep a check small. What a kernel does depends on their
# number only by how many rows each gets.
_EXPERTS = 32
_SMALL_MIXTURE = (384, 256, 8)
_SMALL_MIXTURE_TOKENS = 130


def linear_products(format: QuantFormat) -> Iterator[Product]:
    """Of one matrix."""
    for tokens, *sizes in SMALL:
        yield Product("linear", format, tokens, tuple(sizes))
    for sizes in (sizes for matrices in DENSE.values() for sizes in matrices):
        for tokens in REAL_TOKENS:
            yield Product("linear", format, tokens, sizes)


def grouped_products(format: QuantFormat) -> Iterator[Product]:
    """Of one matrix for every group."""
    for sizes in GROUPED:
        for tokens in REAL_TOKENS:
            yield Product("grouped_linear", format, tokens, sizes)


def mixtures(format: QuantFormat) -> Iterator[Product]:
    """Of experts in this format."""
    yield Product("moe", format, _SMALL_MIXTURE_TOKENS, _SMALL_MIXTURE)
    for widths in GEOMETRIES.values():
        for tokens in REAL_TOKENS:
            yield Product("moe", format, tokens, (*widths, _EXPERTS))


def alike_products(format: QuantFormat) -> Iterator[Product]:
    """Of layers that have this format throughout: groups, and all experts, the shared one too."""
    yield Product("grouped_linear", format, _SMALL_MIXTURE_TOKENS, _SMALL_GROUPED)
    tokens = _SMALL_MIXTURE_TOKENS
    yield Product("moe", format, tokens, _SMALL_MIXTURE, shared=format)


@dataclass(frozen=True)
class PrefillChecks:
    """Makes the checks of products that ``kernel`` computes in ``native``; ``portable`` reads the
    weights that ``native`` packs.
    """

    kernel: str
    native: Table
    portable: Table

    def check(self, product: Product) -> Check:
        """Of one product."""
        return Check(product.name, self.kernel, lambda device: self._wrong(product, device))

    def _wrong(self, product: Product, device: torch.device) -> str | None:
        operands = product.operands(self.native, device)
        if self._falls_back(product.op, operands):
            return "the portable kernel takes its place"
        found = getattr(ops_of(self.native), product.op)(*operands)
        reference = self.native.reference or self.portable
        expected = getattr(ops_of(reference), product.op)(*operands)
        if isinstance(expected, Mixture):
            tolerance = MIXTURE if self.native.reference is None else REQUANTISED
            return mixture_difference(found, expected, tolerance)
        return difference(found, expected, PRODUCT)

    def _falls_back(self, op: str, operands: tuple[Any, ...]) -> bool:
        """Whether the native launcher records what the portable one does."""
        native = self.native
        portable = self.portable
        if not (isinstance(native, RecordedTable) and isinstance(portable, RecordedTable)):
            return False
        return _recorded(native, op, operands) == _recorded(portable, op, operands)


def _recorded(table: RecordedTable, op: str, operands: tuple[Any, ...]) -> list[str]:
    x = operands[0]
    recording = Recording(Target.of(x.device), x.shape[0])
    getattr(table.on(recording), op)(*operands)
    return [_described(item) for item in recording.items]


def _described(item: Item) -> str:
    """The kernel of a launch, the type of a call's function: native products are no plain ones."""
    return item.signature.kernel if isinstance(item, Launch) else type(item.function).__name__
