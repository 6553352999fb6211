"""The machine finds every planted fault, and none in the kernels as they are."""

import pytest

from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from tests.ptx.edits import unchanged
from tests.ptx.faults import Fault
from tests.ptx.kernels import KERNELS, PACKED
from tests.ptx.planted import Planted, WrongValues
from tests.ptx.planted_hopper import HOPPER
from tests.ptx.planted_scaled import SCALED
from tests.ptx.planted_w16 import W16
from tests.ptx.schedule import SCHEDULES

TABLE = (*HOPPER, *SCALED, *W16)
needs_compiler = pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")


def test_half_of_at_least_24_faults_are_in_blackwell_kernels() -> None:
    assert len(TABLE) >= 24
    assert 2 * (len(SCALED) + len(W16)) >= len(TABLE)
    assert len({(fault.kernel, fault.name) for fault in TABLE}) == len(TABLE)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_without_fault(kernel: str) -> None:
    for name in ("late", "early", "random"):
        KERNELS[kernel](unchanged, SCHEDULES[name])


def found(fault: Planted) -> Exception | None:
    """What the first schedule that finds something finds."""
    run = PACKED if fault.kernel == "packed" else KERNELS[fault.kernel]
    for schedule in SCHEDULES.values():
        try:
            run(fault.edit, schedule)
        except (Fault, WrongValues) as finding:
            return finding
    return None


@pytest.mark.sampled(2)
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: f"{fault.kernel}: {fault.name}")
def test_a_planted_fault_is_found(fault: Planted) -> None:
    finding = found(fault)
    assert isinstance(finding, fault.findings), f"found: {finding!r}"
