"""Blocks that run at once and look for each other's words: the clock, relaxed stores, red, trap."""

import numpy as np
import pytest

from tests.ptx.faults import Deadlock, Trap
from tests.ptx.schedule import SCHEDULES, Schedule, random_schedule
from tests.ptx.snippets import kernel, run_text

# Block 0 publishes a word for every lane, then one more; block 1 looks until its own has come.
HAND_OVER = """
ld.param.u64 %in, [p0];
mov.u32 %r0, %cluster_ctarank;
mad.wide.u32 %at, %lane, 4, %in;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra LOOKS;
add.s32 %r1, %lane, 1;
st.relaxed.gpu.global.u32 [%at], %r1;
st.relaxed.gpu.global.u32 [%at+128], %r1;
bra OUT;
LOOKS:
mov.u64 %l0, %clock64;
add.s64 %l1, %l0, 4000000000;
AGAIN:
mov.u64 %l0, %clock64;
setp.le.s64 %p1, %l0, %l1;
@%p1 bra NOT_YET;
trap;
NOT_YET:
ld.relaxed.gpu.global.u32 %r1, [%at];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra AGAIN;
ld.relaxed.gpu.global.u32 %r2, [%at+128];
ld.param.u64 %out, [p1];
mad.wide.u32 %at, %lane, 8, %out;
st.global.v2.u32 [%at], {%r1, %r2};
OUT:
"""


def hand_over(schedule: Schedule, code: str = HAND_OVER) -> np.ndarray:
    """uint32 ``[32, 2]``: what block 1 saw."""
    words, result = np.zeros(64, np.uint32), np.zeros((32, 2), np.uint32)
    run_text(kernel(code, 2), [words, result], cluster=2, schedule=schedule)
    return result


def test_a_word_comes_in_every_schedule() -> None:
    for schedule in SCHEDULES.values():
        assert np.array_equal(hand_over(schedule)[:, 0], np.arange(32) + 1)


def test_relaxed_stores_come_in_any_order() -> None:
    behind = [hand_over(random_schedule(seed))[:, 1] for seed in range(8)]
    lanes = np.arange(32) + 1
    assert all(((found == 0) | (found == lanes)).all() for found in behind)
    assert any((found == 0).any() for found in behind)
    assert any((found != 0).any() for found in behind)


def test_a_word_that_never_comes_is_a_deadlock() -> None:
    missing = HAND_OVER.replace("st.relaxed.gpu.global.u32 [%at], %r1;", "")
    for schedule in SCHEDULES.values():
        with pytest.raises(Deadlock, match=r"block 1 warp 0 at mov.u64 %l0, %clock64"):
            hand_over(schedule, missing)


def test_the_clock_grows() -> None:
    code = """
    mov.u64 %l0, %clock64;
    st.shared.b32 [smem], %lane;
    mov.u64 %l1, %clock64;
    ld.param.u64 %out, [p0];
    st.global.u64 [%out], %l0;
    st.global.u64 [%out+8], %l1;
    """
    found = np.zeros(2, np.uint64)
    run_text(kernel(code, 1), [found])
    assert found[0] < found[1]


@pytest.mark.parametrize(
    ("opcode", "dtype", "wanted"),
    [
        ("add.u64", np.uint64, 7 + 31 * 16),
        ("add.u32", np.uint32, 7 + 31 * 16),
        ("max.s32", np.int32, 31),
        ("or.b32", np.uint32, 31),
    ],
)
def test_red(opcode: str, dtype: type, wanted: int) -> None:
    wide = "cvt.u64.u32 %l0, %lane;" if dtype is np.uint64 else ""
    value = "%l0" if wide else "%lane"
    code = f"ld.param.u64 %out, [p0]; {wide} red.relaxed.gpu.global.{opcode} [%out], {value};"
    word = np.array([7], dtype)
    run_text(kernel(code, 1), [word])
    assert word[0] == wanted


def test_a_trap_is_a_fault() -> None:
    code = "setp.eq.u32 %p0, %lane, LANE; @%p0 trap;"
    run_text(kernel(code.replace("LANE", "32")), [])
    with pytest.raises(Trap):
        run_text(kernel(code.replace("LANE", "5")), [])
