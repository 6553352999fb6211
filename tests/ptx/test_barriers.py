"""Barriers: phases, announced bytes, over-arrival, deadlock, clusters, and setmaxnreg."""

import numpy as np
import pytest

from tests.ptx.faults import (
    Deadlock,
    EndedBlock,
    NoBarrier,
    NotConverged,
    RegisterBudget,
    TooManyArrivals,
)
from tests.ptx.schedule import SCHEDULES, random_schedule
from tests.ptx.snippets import kernel, run_text

# Leaves %p0 to be true in lane 0 of warp 0, %r30 at the barrier, initialised for %r31 arrivals.
INIT = """
setp.eq.u32 %p0, %thread, 0;
mov.u32 %r30, smem;
@%p0 mbarrier.init.shared.b64 [%r30], %r31;
bar.sync 0;
"""


def wait(parity: int | str) -> str:
    return f"""{{
    .reg .pred P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r30], {parity}, 10000000;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }}"""


def barrier(count: int, body: str) -> str:
    return f"mov.b32 %r31, {count};{INIT}{body}"


def test_a_phase_ends_with_its_last_arrival() -> None:
    body = f"""
    ld.param.u64 %out, [p0];
    mov.b32 %r0, 5;
    @!%p0 bra AFTER;
    st.global.b32 [%out], %r0;
    AFTER:
    mbarrier.arrive.shared.b64 _, [%r30];
    {wait(0)}
    ld.global.b32 %r1, [%out];
    mad.wide.u32 %at, %thread, 4, %out;
    st.global.b32 [%at+4], %r1;
    """
    for seed in range(6):
        result = np.zeros(65, np.uint32)
        text = kernel(barrier(64, body), 1, 64)
        run_text(text, [result], 64, schedule=random_schedule(seed))
        assert (result == 5).all()


def test_the_other_parity_has_already_ended() -> None:
    run_text(kernel(barrier(1, wait(1))), [])


def test_a_missing_arrival_is_a_deadlock() -> None:
    body = f"@%p0 mbarrier.arrive.shared.b64 _, [%r30];{wait(0)}"
    run_text(kernel(barrier(1, body)), [])
    with pytest.raises(Deadlock, match="warp 0 at mbarrier.try_wait"):
        run_text(kernel(barrier(2, body)), [])


def test_one_arrival_too_many() -> None:
    arrive = "mov.b32 %r0, 3; @%p0 mbarrier.arrive.shared.b64 _, [%r30], %r0;"
    run_text(kernel(barrier(3, arrive)), [])
    with pytest.raises(TooManyArrivals, match="expects 2 arrivals"):
        run_text(kernel(barrier(2, arrive)), [])


def test_announced_bytes_keep_a_phase_open() -> None:
    announce = "mov.b32 %r0, 16; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r30], %r0;"
    with pytest.raises(Deadlock):
        run_text(kernel(barrier(1, announce + wait(0))), [])
    copy = """
    ld.param.u64 %in, [p0];
    add.s32 %r1, %r30, 128;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%in], 16, [%r30];
    """
    run_text(kernel(barrier(1, announce + copy + wait(0)), 1), [np.zeros(4, np.uint32)])


def test_a_wait_that_nobody_can_end_may_say_no() -> None:
    body = """
    mbarrier.try_wait.parity.shared.b64 %p1, [%r30], 0;
    ld.param.u64 %out, [p0];
    selp.b32 %r0, 7, 8, %p1;
    @%p0 st.global.b32 [%out], %r0;
    """
    result = np.zeros(1, np.uint32)
    run_text(kernel(barrier(1, body), 1), [result])
    assert result[0] == 8


def test_memory_without_a_barrier() -> None:
    with pytest.raises(NoBarrier):
        run_text(kernel("mov.u32 %r30, smem; mbarrier.arrive.shared.b64 _, [%r30];"), [])


def test_named_barriers_count_their_threads() -> None:
    half = """
    setp.lt.u32 %p1, %thread, 64;
    @!%p1 bra OUT;
    bar.sync 1, 64;
    OUT:
    """
    run_text(kernel(half, threads=96), [], 96)
    with pytest.raises(Deadlock, match="bar.sync"):
        run_text(kernel(half.replace("1, 64", "1, 96"), threads=96), [], 96)
    with pytest.raises(TooManyArrivals):
        run_text(kernel(half.replace("1, 64", "1, 48"), threads=96), [], 96)


def test_some_warps_only_arrive() -> None:
    body = """
    ld.param.u64 %out, [p0];
    setp.lt.u32 %p1, %thread, 32;
    @%p1 bra WAITS;
    mov.b32 %r0, 5;
    st.global.b32 [%out], %r0;
    bar.arrive 2, 64;
    bra OUT;
    WAITS:
    bar.sync 2, 64;
    ld.global.b32 %r0, [%out];
    st.global.b32 [%out+4], %r0;
    OUT:
    """
    for schedule in SCHEDULES.values():
        result = np.zeros(2, np.uint32)
        run_text(kernel(body, 1, 64), [result], 64, schedule=schedule)
        assert (result == 5).all()


def test_a_lane_may_have_a_barrier_of_its_own() -> None:
    body = """
    mov.u32 %r0, smem;
    mad.lo.s32 %r0, %lane, 8, %r0;
    add.s32 %r1, %lane, 1;
    mbarrier.init.shared.b64 [%r0], %r1;
    mbarrier.arrive.shared.b64 _, [%r0], %r1;
    """
    run_text(kernel(body), [])
    with pytest.raises(TooManyArrivals):
        run_text(kernel(body + "mbarrier.arrive.shared.b64 _, [%r0], 64;"), [])


def test_a_test_says_no_or_waits() -> None:
    test = "mbarrier.test_wait.parity.shared.b64 %p1, [%r30], 0;"
    body = f"""
    setp.lt.u32 %p2, %thread, 32;
    @%p2 bra TESTS;
    @!%p2 bra ARRIVES;
    TESTS:
    {test}
    ld.param.u64 %out, [p0];
    selp.b32 %r0, 7, 8, %p1;
    st.global.b32 [%out], %r0;
    bra OUT;
    ARRIVES:
    mbarrier.arrive.shared.b64 _, [%r30];
    OUT:
    """
    found = set()
    for seed in range(12):
        result = np.zeros(1, np.uint32)
        text = kernel(barrier(32, body), 1, 64)
        run_text(text, [result], 64, schedule=random_schedule(seed))
        found.add(int(result[0]))
    assert found == {7, 8}


def test_a_barrier_of_lanes_that_never_come() -> None:
    body = """
    setp.lt.u32 %p1, %lane, 16;
    @%p1 bra A;
    bar.sync 1;
    bra OUT;
    A:
    bar.sync 2;
    OUT:
    """
    with pytest.raises(NotConverged):
        run_text(kernel(body), [])


PEER = f"""
mov.b32 %r31, 1;
{INIT}
mov.u32 %r10, %cluster_ctarank;
barrier.cluster.arrive;
barrier.cluster.wait;
xor.b32 %r11, %r10, 1;
mapa.shared::cluster.u32 %r12, %r30, %r11;
@%p0 mbarrier.arrive.shared::cluster.b64 _, [%r12];
"""
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
# Every lane's number to the other block, which waits for BYTES.
MAIL = f"""
mov.b32 %r31, 1;
{INIT}
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r30], BYTES;
{MEET}
mov.u32 %r10, %cluster_ctarank;
xor.b32 %r11, %r10, 1;
mapa.shared::cluster.u32 %r12, %r30, %r11;
mad.lo.u32 %r13, %lane, 4, %r12;
mad.lo.u32 %r14, %r10, 100, %lane;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r13+128], %r14, [%r12];
{wait(0)}
mad.lo.u32 %r13, %lane, 4, %r30;
ld.shared.b32 %r14, [%r13+128];
ld.param.u64 %out, [p0];
mad.lo.u32 %r15, %r10, 32, %lane;
mad.wide.u32 %at, %r15, 4, %out;
st.global.b32 [%at], %r14;
{MEET}
"""


def test_bytes_of_asynchronous_stores_are_waited_for() -> None:
    numbers = np.arange(32, dtype=np.uint32)
    for schedule in SCHEDULES.values():
        result = np.zeros(64, np.uint32)
        text = kernel(MAIL.replace("BYTES", "128"), 1)
        run_text(text, [result], cluster=2, schedule=schedule)
        assert (result == np.concatenate([100 + numbers, numbers])).all()
    for count, fault in (("132", Deadlock), ("0", EndedBlock)):
        text = kernel(MAIL.replace("BYTES", count), 1)
        with pytest.raises(fault):
            run_text(text, [np.zeros(64, np.uint32)], cluster=2, schedule=SCHEDULES["late"])


@pytest.mark.parametrize(
    ("words", "value"), [("v4.u32", "{%r14, %lane, %r31, %r30}"), ("v2.f32", "{%r14, %lane}")]
)
def test_an_asynchronous_store_takes_several_words(words: str, value: str) -> None:
    count = value.count(",") + 1
    text = MAIL.replace("BYTES", str(128 * count)).replace(
        "%lane, 4, %r", f"%lane, {4 * count}, %r"
    )
    text = text.replace("bytes.b32", f"bytes.{words}").replace("], %r14, [", f"], {value}, [")
    numbers = np.arange(32, dtype=np.uint32)
    for word, expected in enumerate(([100 + numbers, numbers], [numbers, numbers])):
        result = np.zeros(64, np.uint32)
        read = text.replace(
            "ld.shared.b32 %r14, [%r13+128]", f"ld.shared.b32 %r14, [%r13+{128 + 4 * word}]"
        )
        run_text(kernel(read, 1), [result], cluster=2, schedule=SCHEDULES["late"])
        assert (result == np.concatenate(expected)).all()


def run_often(text: str) -> None:
    for seed in range(12):
        run_text(text, [], cluster=2, schedule=random_schedule(seed))


def test_blocks_of_a_cluster_arrive_at_each_other() -> None:
    run_often(kernel(f"{PEER}{wait(0)}{MEET}"))


def test_a_block_must_not_end_before_its_peer_arrives() -> None:
    with pytest.raises(EndedBlock):
        run_often(kernel(PEER))


def test_a_cluster_barrier_waits_for_every_block() -> None:
    # The barriers of the peer may not be there yet.
    early = PEER.replace("barrier.cluster.arrive;\nbarrier.cluster.wait;\n", "")
    with pytest.raises(NoBarrier):
        run_often(kernel(f"{early}{wait(0)}{MEET}"))


def test_setmaxnreg_waits_for_registers_and_has_no_more() -> None:
    # 65,536 registers of 256 threads: 255 each, 248 to divide by eight.
    body = """
    setp.lt.u32 %p1, %thread, 128;
    @%p1 bra FIRST;
    setmaxnreg.inc.sync.aligned.u32 INC;
    bra OUT;
    FIRST:
    setmaxnreg.dec.sync.aligned.u32 DEC;
    OUT:
    """
    text = kernel(body, threads=384).replace("128", "256")
    # 168 at the launch: two warpgroups give 2 · (168 - 56), one takes 224 more.
    run_text(text.replace("INC", "256").replace("DEC", "120"), [], 384)
    with pytest.raises(RegisterBudget):
        run_text(text.replace("INC", "256").replace("DEC", "128"), [], 384)
    with pytest.raises(RegisterBudget, match="dec to 176"):
        run_text(text.replace("INC", "256").replace("DEC", "176"), [], 384)
