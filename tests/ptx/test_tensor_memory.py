"""Tensor memory: allocation, waits, and which lanes a warp may touch."""

import numpy as np
import pytest

from tests.ptx.faults import BeyondAllocation, Deadlock, NotFreed, TooEarly, WrongQuarter
from tests.ptx.schedule import SCHEDULES
from tests.ptx.snippets import kernel, run_text

ALLOCATE = """
mov.u32 %r30, smem;
mov.b32 %r29, COLUMNS;
setp.lt.u32 %p0, %thread, 32;
@!%p0 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r30], %r29;
ALLOCATED:
bar.sync 0;
ld.shared.b32 %r28, [%r30];
"""
FREE = """
bar.sync 0;
@!%p0 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r28, %r29;
FREED:
"""
# %r27: the warp's quarter of the lanes.
QUARTER = "shr.u32 %r27, %thread, 5; shl.b32 %r27, %r27, 21; add.s32 %r27, %r27, %r28;"
OWN = """
add.s32 %r1, %thread, 100;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r27], {%thread, %r1};
WAIT_STORE
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r2, %r3}, [%r27+COLUMN];
WAIT_LOAD
add.s32 %r4, %r2, %r3;
ld.param.u64 %out, [p0];
mad.wide.u32 %at, %thread, 4, %out;
st.global.b32 [%at], %r4;
"""
WAITS = {
    "WAIT_STORE": "tcgen05.wait::st.sync.aligned;",
    "WAIT_LOAD": "tcgen05.wait::ld.sync.aligned;",
    "COLUMNS": "32",
    "COLUMN": "0",
}


def run(
    name: str = "late", body: str = ALLOCATE + QUARTER + OWN + FREE, **changes: str
) -> np.ndarray:
    text = kernel(body, 1, 128)
    for key, value in {**WAITS, **changes}.items():
        text = text.replace(key, value)
    result = np.zeros(128, np.uint32)
    run_text(text, [result], 128, schedule=SCHEDULES[name])
    return result


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warp_reads_what_it_stored(name: str) -> None:
    assert np.array_equal(run(name), 2 * np.arange(128) + 100)


@pytest.mark.parametrize("name", ["late", "early"])
def test_results_of_loads_need_their_wait(name: str) -> None:
    with pytest.raises(TooEarly, match="%r2 of tcgen05.ld"):
        run(name, WAIT_LOAD="")


@pytest.mark.parametrize("name", ["late", "early"])
def test_stores_need_their_wait(name: str) -> None:
    with pytest.raises(TooEarly, match="before tcgen05.wait::st"):
        run(name, WAIT_STORE="")


def test_a_move_of_a_loaded_register_is_on_its_way_too() -> None:
    moved = OWN.replace("WAIT_LOAD", "mov.b32 %r5, %r3; WAIT_LOAD").replace(
        "%r2, %r3;", "%r2, %r5;"
    )
    body = ALLOCATE + QUARTER + moved + FREE
    assert np.array_equal(run(body=body), 2 * np.arange(128) + 100)
    with pytest.raises(TooEarly, match="%r5 of tcgen05.ld"):
        run(body=body.replace("%r4, %r2, %r5", "%r4, %thread, %r5"), WAIT_LOAD="")


def test_what_is_allocated_must_be_freed() -> None:
    with pytest.raises(NotFreed, match="32 columns"):
        run(body=ALLOCATE + QUARTER + OWN)


def test_only_allocated_columns_may_be_used() -> None:
    with pytest.raises(BeyondAllocation, match="columns 511 to 512"):
        run(COLUMN="31")


def test_a_warp_touches_its_own_quarter() -> None:
    with pytest.raises(WrongQuarter):
        run(body=ALLOCATE + QUARTER.replace("5;", "6;", 1) + OWN + FREE)


def test_a_number_of_columns_is_a_power_of_two() -> None:
    with pytest.raises(BeyondAllocation, match="48 columns"):
        run(COLUMNS="48")


def test_an_allocation_waits_for_free_columns() -> None:
    again = ALLOCATE + ALLOCATE.replace("ALLOCATED", "AGAIN") + FREE
    with pytest.raises(Deadlock, match="tcgen05.alloc"):
        run(body=again, COLUMNS="512")
