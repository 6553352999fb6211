"""cp.async: groups, zeros behind the source, and what a missing wait leaves."""

import numpy as np
import pytest

from tests.ptx.faults import EndedBlock, Misaligned, OutOfBounds
from tests.ptx.schedule import SCHEDULES
from tests.ptx.snippets import kernel, run_text

# Two copies of a word by every lane, a group each.
COPY = """
ld.param.u64 %in, [p0];
mad.wide.u32 %at, %lane, 4, %in;
mov.u32 %r0, smem;
mad.lo.s32 %r1, %lane, 4, %r0;
cp.async.ca.shared.global [%r1], [%at], 4;
cp.async.commit_group;
cp.async.ca.shared.global.L2::128B [%r1+128], [%at+128], 4;
cp.async.commit_group;
WAIT
ld.shared.b32 %r2, [%r1];
ld.shared.b32 %r3, [%r1+128];
ld.param.u64 %out, [p1];
mad.wide.u32 %at, %lane, 4, %out;
st.global.b32 [%at], %r2;
st.global.b32 [%at+128], %r3;
cp.async.wait_all;
"""
POISON = np.uint32(0xFFFFFFFF)


def copied(wait: str, schedule: str) -> tuple[bool, bool]:
    """Whether each of the groups had come."""
    source, result = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    text = kernel(COPY.replace("WAIT", wait), 2)
    run_text(text, [source, result], schedule=SCHEDULES[schedule])
    come = (result == source).reshape(2, 32).all(1)
    assert ((result == source) | (result == POISON)).all()
    return bool(come[0]), bool(come[1])


def test_groups_come_when_they_are_waited_for() -> None:
    for schedule in SCHEDULES:
        assert copied("cp.async.wait_group 0;", schedule) == (True, True)
        assert copied("cp.async.wait_all;", schedule) == (True, True)
        assert copied("cp.async.wait_group 1;", schedule)[0]
    assert copied("", "late") == (False, False)


def test_what_is_not_committed_only_wait_all_waits_for() -> None:
    open_group = COPY.replace("cp.async.commit_group;", "")
    for wait, come in (("cp.async.wait_group 0;", False), ("cp.async.wait_all;", True)):
        source, result = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
        text = kernel(open_group.replace("WAIT", wait), 2)
        run_text(text, [source, result], schedule=SCHEDULES["late"])
        assert (result == (source if come else POISON)).all()


def test_a_block_must_not_end_before_its_copies() -> None:
    body = COPY.replace("WAIT", "").replace("cp.async.wait_all;", "")
    tensors = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
    with pytest.raises(EndedBlock):
        run_text(kernel(body, 2), tensors, schedule=SCHEDULES["late"])


# Every lane arrives behind a copy of a word, and all wait.
ARRIVE = """
mov.u32 %r0, smem;
mad.lo.s32 %r1, %lane, 4, %r0;
setp.eq.u32 %p0, %lane, 0;
mov.b32 %r2, 32;
@%p0 mbarrier.init.shared.b64 [%r0+128], %r2;
bar.warp.sync 0xffffffff;
ld.param.u64 %in, [p0];
mad.wide.u32 %at, %lane, 4, %in;
cp.async.ca.shared.global [%r1], [%at], 4;
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r0+128];
mov.b32 %r3, 0;
WAIT
ld.shared.b32 %r2, [%r1];
ld.param.u64 %out, [p1];
mad.wide.u32 %at, %lane, 4, %out;
st.global.b32 [%at], %r2;
cp.async.wait_all;
"""
WAIT = """
$again:
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0+128], %r3;
@!%p1 bra $again;
"""


def test_an_arrival_waits_for_the_copies_before_it() -> None:
    source = np.arange(32, dtype=np.uint32)
    for schedule in SCHEDULES.values():
        result = np.zeros(32, np.uint32)
        run_text(kernel(ARRIVE.replace("WAIT", WAIT), 2), [source, result], schedule=schedule)
        assert np.array_equal(result, source)
    run_text(kernel(ARRIVE.replace("WAIT", ""), 2), [source, result], schedule=SCHEDULES["late"])
    assert (result == POISON).all()


def vectors(operands: str) -> str:
    """A copy of 16 bytes by every lane."""
    return f"""
    ld.param.u64 %in, [p0];
    mad.wide.u32 %at, %lane, 16, %in;
    mov.u32 %r0, smem;
    mad.lo.s32 %r1, %lane, 16, %r0;
    {operands}
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1];
    ld.param.u64 %out, [p1];
    mad.wide.u32 %at, %lane, 16, %out;
    st.global.v4.b32 [%at], {{%r2, %r3, %r4, %r5}};
    """


def test_zeros_follow_a_short_source() -> None:
    source = np.arange(128, dtype=np.uint32) + 1
    hint = "createpolicy.fractional.L2::evict_first.b64 %l0, 1.0;"
    once = f"{hint} cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%at], 16"
    result = np.zeros(128, np.uint32)
    run_text(kernel(vectors(f"{once}, %l0;"), 2), [source, result])
    assert np.array_equal(result, source)
    short = "mov.b32 %r6, 8; cp.async.cg.shared.global [%r1], [%at], 16, %r6;"
    for code in (short, f"mov.b32 %r6, 8; {once}, %r6, %l0;"):
        run_text(kernel(vectors(code), 2), [source, result])
        wanted = source.reshape(32, 4) * np.array([1, 1, 0, 0], np.uint32)
        assert np.array_equal(result.reshape(32, 4), wanted)


def test_bounds_and_alignment() -> None:
    code = vectors("cp.async.cg.shared.global [%r1], [%at], 16;")
    with pytest.raises(OutOfBounds):
        run_text(kernel(code, 2), [np.zeros(127, np.uint32), np.zeros(128, np.uint32)])
    for moved in ("[%r1], [%at+8]", "[%r1+8], [%at]"):
        text = kernel(code.replace("[%r1], [%at]", moved), 2)
        with pytest.raises(Misaligned):
            run_text(text, [np.zeros(160, np.uint32), np.zeros(128, np.uint32)])
