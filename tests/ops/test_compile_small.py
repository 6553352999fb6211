"""The small kernels around a step compile for every target without spilling; no GPU needed."""

import pytest

from dsv4.launch.loader import ARCHITECTURES, compile_source
from tests.ops.sass import resources

KERNELS = {"opening": ("embed", "embed_any_width", "next_positions"), "token_ring": ("store_token",)}


@pytest.mark.parametrize("source", KERNELS)
def test_compiles_without_spills(source: str) -> None:
    for architecture in ARCHITECTURES:
        found = resources(compile_source(source, architecture).log)
        assert {name: spill for name, (_, spill) in found.items()} == dict.fromkeys(KERNELS[source], 0), architecture
