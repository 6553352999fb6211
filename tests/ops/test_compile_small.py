"""The small kernels around a step compile for every target without spilling; no GPU needed."""

import pytest

from dsv4.launch.compiler import compile_source
from dsv4.launch.target import ARCHITECTURES
from tests.ops.sass import resources

KERNELS = {
    "opening/opening": ("embed", "embed_any_geometry", "next_positions"),
    "token_ring/token_ring": ("store_token",),
}


@pytest.mark.parametrize("source", KERNELS)
def test_compiles_without_spills(source: str) -> None:
    for architecture in ARCHITECTURES:
        found = resources(compile_source(source, architecture).log)
        spills = {name: spill for name, (_, spill) in found.items()}
        assert spills == dict.fromkeys(KERNELS[source], 0), architecture
