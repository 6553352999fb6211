"""What lanes tell each other."""

import numpy as np
import pytest

from tests.ptx.schedule import SCHEDULES, random_schedule
from tests.ptx.snippets import kernel, run_lanes, run_text

LANES = np.arange(32)
VALUES = (LANES * 10).astype(np.uint32)


@pytest.mark.parametrize(
    ("form", "by", "limits", "expected"),
    [
        ("idx", 5, 31, np.full(32, 5)),
        ("bfly", 1, 31, LANES ^ 1),
        ("bfly", 16, 31, LANES ^ 16),
        ("down", 4, 31, np.where(LANES < 28, LANES + 4, LANES)),
        ("up", 4, 0, np.where(LANES >= 4, LANES - 4, LANES)),
        # Segments of eight lanes: mask 0b11000 in bits 8 to 12.
        ("down", 2, 0x1807, np.where(LANES % 8 < 6, LANES + 2, LANES)),
        ("idx", 3, 0x1807, LANES // 8 * 8 + 3),
        ("up", 3, 0x1800, np.where(LANES % 8 >= 3, LANES - 3, LANES)),
    ],
)
def test_shfl(form: str, by: int, limits: int, expected: np.ndarray) -> None:
    code = f"shfl.sync.{form}.b32 %d|%p0, %a0, {by}, {limits}, -1;"
    assert np.array_equal(run_lanes(code, [VALUES]), 10 * expected)
    code = f"shfl.sync.{form}.b32 %r0|%p0, %a0, {by}, {limits}, -1; selp.b32 %d, 1, 0, %p0;"
    moved = form in ("idx", "bfly") or expected != LANES
    assert np.array_equal(run_lanes(code, [VALUES]), np.broadcast_to(moved, 32))


def test_shfl_with_a_lane_of_each_lane() -> None:
    code = "shfl.sync.idx.b32 %d, %a0, %a1, 31, -1;"
    assert np.array_equal(run_lanes(code, [VALUES, (31 - LANES).astype(np.uint32)]), VALUES[::-1])


def test_votes() -> None:
    code = "setp.lt.u32 %p0, %lane, 3; vote.sync.ballot.b32 %d, %p0, -1;"
    assert (run_lanes(code, []) == 7).all()
    for form, expected in (("any", 1), ("all", 0)):
        code = f"""
        setp.lt.u32 %p0, %lane, 3;
        vote.sync.{form}.pred %p1, %p0, -1;
        selp.b32 %d, 1, 0, %p1;
        """
        assert (run_lanes(code, []) == expected).all()


def test_redux() -> None:
    assert (run_lanes("redux.sync.add.s32 %d, %a0, -1;", [VALUES]) == VALUES.sum()).all()
    assert (run_lanes("redux.sync.max.u32 %d, %a0, -1;", [VALUES]) == 310).all()


def test_match_finds_the_lanes_of_the_same_value() -> None:
    values = (LANES % 5).astype(np.uint32)
    expected = [sum(1 << int(lane) for lane in np.flatnonzero(values == value)) for value in values]
    assert np.array_equal(run_lanes("match.any.sync.b32 %d, %a0, -1;", [values]), expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_elect_takes_one_lane_and_always_the_same(name: str) -> None:
    body = """
    ld.param.u64 %out, [p0];
    mov.b32 %r1, 0;
    elect.sync %r0|%p0, -1;
    @%p0 add.s32 %r1, %r1, 1;
    elect.sync %r2|%p1, -1;
    @%p1 add.s32 %r1, %r1, 1;
    mad.wide.u32 %at, %lane, 4, %out;
    st.global.b32 [%at], %r1;
    """
    result = np.zeros(32, np.uint32)
    run_text(kernel(body, 1), [result], schedule=SCHEDULES[name])
    assert sorted(result.tolist()) == [0] * 31 + [2]


def test_lanes_meet_before_an_instruction_of_the_whole_warp() -> None:
    code = """
    setp.lt.u32 %p0, %lane, 16;
    mov.b32 %r0, %lane;
    @%p0 bra MEET;
    add.s32 %r0, %r0, 100;
    MEET:
    shfl.sync.bfly.b32 %d, %r0, 16, 31, -1;
    """
    expected = np.where(LANES < 16, LANES + 116, LANES - 16)
    assert np.array_equal(run_lanes(code, []), expected)


@pytest.mark.parametrize("seed", range(8))
def test_lanes_that_wait_let_the_others_of_their_warp_go_on(seed: int) -> None:
    """Lane 0 ends the phase that the other lanes wait for, whoever of them goes first."""
    body = """
    mov.u32 %r30, smem;
    mov.b32 %r0, 1;
    setp.eq.u32 %p0, %lane, 0;
    @%p0 mbarrier.init.shared.b64 [%r30], %r0;
    bar.sync 0;
    @%p0 bra ARRIVE;
    LOOP:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r30], 0;
    @!%p1 bra LOOP;
    bra MEET;
    ARRIVE:
    mbarrier.arrive.shared.b64 _, [%r30];
    MEET:
    bar.sync 0;
    """
    run_text(kernel(body), [], schedule=random_schedule(seed))


@pytest.mark.parametrize("seed", range(8))
def test_every_lane_waits_for_its_own_barrier(seed: int) -> None:
    """Half of the lanes wait for a phase that has ended, half for one that warp 1 ends."""
    body = """
    ld.param.u64 %out, [p0];
    mad.wide.u32 %at, %thread, 4, %out;
    mov.u32 %r30, smem;
    mov.b32 %r0, 1;
    setp.eq.u32 %p0, %thread, 0;
    @%p0 mbarrier.init.shared.b64 [%r30], %r0;
    @%p0 mbarrier.init.shared.b64 [%r30+8], %r0;
    bar.sync 0;
    setp.lt.u32 %p1, %thread, 32;
    @%p1 bra WAIT;
    setp.eq.u32 %p0, %lane, 0;
    mov.b32 %r1, 77;
    @%p0 st.global.b32 [%out+256], %r1;
    @%p0 mbarrier.arrive.shared.b64 _, [%r30+8];
    bra DONE;
    WAIT:
    setp.lt.u32 %p2, %lane, 16;
    selp.b32 %r2, 0, 8, %p2;
    selp.b32 %r3, 1, 0, %p2;
    add.s32 %r2, %r2, %r30;
    LOOP:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], %r3;
    @!%p3 bra LOOP;
    ld.global.b32 %r4, [%out+256];
    st.global.b32 [%at], %r4;
    DONE:
    """
    result = np.zeros(65, np.uint32)
    run_text(kernel(body, 1, 64), [result], 64, schedule=random_schedule(seed))
    assert (result[16:32] == 77).all()


def test_a_matrix_is_transposed() -> None:
    rows = np.arange(64, dtype=np.uint16).reshape(8, 8)
    code = "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a0;"
    found = run_lanes(code, [rows.view(np.uint32).reshape(32)]).astype(np.uint32)
    assert np.array_equal(found.view(np.uint16).reshape(8, 8), rows.T)
