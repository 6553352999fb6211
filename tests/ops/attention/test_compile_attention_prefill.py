"""The prefill attention kernels compile for every target without spilling registers."""

import pytest

from dsv4.launch import loader
from tests.ops.sass import resources


@pytest.mark.parametrize("architecture", loader.ARCHITECTURES)
@pytest.mark.parametrize("geometry", [(512, 64), (64, 16)], ids=["real", "tiny"])
def test_compiles_without_spills(architecture: str, geometry: tuple[int, int]) -> None:
    compiled = loader.compile_source("attention_prefill", architecture, (("DIM", geometry[0]), ("ROPE", geometry[1])))
    found = resources(compiled.log)
    assert set(found) == {"attention_prefill", "attention_prefill_decode"}
    assert {spills for _, spills in found.values()} == {0}


def test_wgmma_products_are_not_serialised() -> None:
    """The assembler says so when it has to wait after every product because accumulators are touched in between.

    One or two loop constants may spill: the accumulators fill the registers.
    """
    compiled = loader.compile_source("attention_prefill_sm90", "sm_90a", (("DIM", 512), ("ROPE", 64)))
    assert resources(compiled.log)["attention_prefill_sm90"][1] <= 32
    assert "serialized" not in compiled.log
