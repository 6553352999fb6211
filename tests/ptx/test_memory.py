"""What the machine refuses about memory: bounds, alignment, missing fences, ended blocks."""

import numpy as np
import pytest

from tests.ptx.faults import (
    BadDescriptor,
    Misaligned,
    MissingFence,
    NotOneThread,
    OutOfBounds,
    Unsupported,
)
from tests.ptx.schedule import SCHEDULES
from tests.ptx.snippets import kernel, run_lanes, run_text
from tests.ptx.tensor_map import ELEMENTS, TensorMap

LOAD = "ld.param.u64 %in, [p0]; mad.wide.u32 %at, %thread, 16, %in;"


@pytest.mark.parametrize("opcode", ["ld.global.v4.b32", "ld.global.nc.L1::no_allocate.v4.b32"])
def test_only_tensors_may_be_read(opcode: str) -> None:
    read = f"{LOAD} {opcode} {{%r0, %r1, %r2, %r3}}, [%at];"
    run_text(kernel(read, 1), [np.zeros(128, np.uint32)])
    with pytest.raises(OutOfBounds, match="496 from the start of tensor 0"):
        run_text(kernel(read, 1), [np.zeros(127, np.uint32)])


def test_only_tensors_may_be_written() -> None:
    write = f"{LOAD} mov.b32 %r0, 1; setp.lt.u32 %p0, %thread, 31; @%p0 st.global.b32 [%at], %r0;"
    run_text(kernel(write, 1), [np.zeros(127, np.uint32)])
    with pytest.raises(OutOfBounds):
        run_text(kernel(write.replace("31", "32"), 1), [np.zeros(124, np.uint32)])


def test_tables_of_the_module_are_read_where_they_are() -> None:
    """NVRTC 13.0 has one for sines of large angles."""
    body = """
    mov.u64 %l0, table;
    mad.wide.u32 %l1, %lane, 4, %l0;
    ld.global.nc.b32 %r0, [%l1];
    ld.param.u64 %out, [p0];
    mad.wide.u32 %at, %lane, 4, %out;
    st.global.b32 [%at], %r0;
    """
    content = np.arange(32, dtype=np.uint32) * 0x01020304
    numbers = ", ".join(map(str, content.tobytes()))
    table = f".global .align 4 .b8 table[128] = {{{numbers}}};"
    result = np.zeros(32, np.uint32)
    for _ in range(2):
        run_text(table + kernel(body, 1), [result])
        assert np.array_equal(result, content)
        result[:] = 0
    with pytest.raises(OutOfBounds, match="128 from the start of table"):
        run_text(table + kernel(body.replace("[%l1]", "[%l1+4]"), 1), [result])


def test_wide_accesses_are_aligned() -> None:
    with pytest.raises(Misaligned):
        run_text(kernel(f"{LOAD} ld.global.v2.b32 {{%r0, %r1}}, [%at+4];", 1), [np.zeros(256)])
    with pytest.raises(Misaligned):
        run_text(kernel("mov.u32 %r0, smem; ld.shared.b32 %r1, [%r0+2];"), [])


def test_shared_memory_ends_where_the_launch_says() -> None:
    read = "mov.u32 %r0, smem; ld.shared.b32 %r1, [%r0+4092];"
    run_text(kernel(read), [], shared_bytes=4096)
    with pytest.raises(OutOfBounds):
        run_text(kernel(read), [], shared_bytes=4095)


def test_shared_memory_is_poisoned_and_keeps_what_is_written() -> None:
    body = """
    mov.u32 %r0, smem;
    mad.lo.s32 %r0, %lane, 4, %r0;
    ld.shared.b32 %r1, [%r0];
    st.shared.b32 [%r0], %lane;
    bar.sync 0;
    xor.b32 %r2, %lane, 3;
    mov.u32 %r0, smem;
    mad.lo.s32 %r0, %r2, 4, %r0;
    ld.shared.b32 %r2, [%r0];
    ld.param.u64 %out, [p0];
    mad.wide.u32 %at, %lane, 8, %out;
    st.global.v2.b32 [%at], {%r1, %r2};
    """
    result = np.zeros((32, 2), np.uint32)
    run_text(kernel(body, 1), [result])
    assert (result[:, 0] == 0xFFFFFFFF).all()
    assert np.array_equal(result[:, 1], np.arange(32) ^ 3)


def test_shared_memory_has_generic_addresses() -> None:
    body = """
    mov.u32 %r0, smem;
    mov.b32 %r9, 77;
    st.shared.b32 [%r0], %r9;
    cvt.u64.u32 %l0, %r0;
    cvta.shared.u64 %l1, %l0;
    ld.b32 %r1, [%l1];
    ld.param.u64 %out, [p0];
    st.b32 [%out], %r1;
    """
    result = np.zeros(1, np.uint32)
    run_text(
        kernel(
            body.replace("st.shared.b32 [%r0], 77", "mov.b32 %r9, 77; st.shared.b32 [%r0], %r9"), 1
        ),
        [result],
    )
    assert result[0] == 77


def test_stmatrix_transposed() -> None:
    body = """
    mov.u32 %r0, smem;
    and.b32 %r1, %lane, 15;
    mad.lo.s32 %r1, %r1, 16, %r0;
    add.s32 %r2, %lane, 256;
    stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r1], {%lane, %r2};
    bar.sync 0;
    mad.lo.s32 %r1, %lane, 8, %r0;
    ld.shared.v2.b32 {%r3, %r4}, [%r1];
    ld.param.u64 %out, [p0];
    mad.wide.u32 %at, %lane, 8, %out;
    st.global.v2.b32 [%at], {%r3, %r4};
    """
    result = np.zeros((2, 8, 8), np.uint16)
    run_text(kernel(body, 1), [result])
    for row in range(8):
        for column in range(8):
            # Element (row, column) of the matrix lies in lane 4 · row + column / 2.
            value = 4 * row + column // 2 if column % 2 == 0 else 0
            assert result[0, column, row] == value
            assert result[1, column, row] == (value + 256 if column % 2 == 0 else 0)


BOX = """
mov.u32 %r0, smem;
setp.eq.u32 %p0, %thread, 0;
mad.lo.s32 %r1, %thread, 4, %r0;
st.shared.b32 [%r1], %thread;
FENCE
bar.sync 0;
mov.u64 %l0, m0;
cvta.param.u64 %l0, %l0;
mov.b32 %r2, 0;
@%p0 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%l0, {%r2}], [%r0];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group.read 0;
"""


@pytest.mark.parametrize("name", ["late", "early"])
def test_the_asynchronous_proxy_needs_a_fence(name: str) -> None:
    result = np.zeros(64, np.uint32)
    box = TensorMap(result.ctypes.data, ELEMENTS[2], (64,), (), (64,), 0).encode()
    text = kernel("ld.param.u64 %in, [p0];" + BOX, 1, 64, 1)
    schedule = SCHEDULES[name]
    fenced = text.replace("FENCE", "fence.proxy.async.shared::cta;")
    run_text(fenced, [result], 64, schedule=schedule, maps=[box])
    assert np.array_equal(result, np.arange(64))
    with pytest.raises(MissingFence, match="warp [01] wrote"):
        run_text(text.replace("FENCE", ""), [result], 64, schedule=schedule, maps=[box])


TMA = """
mov.u32 %r0, smem;
setp.eq.u32 %p0, %thread, 0;
mov.b32 %r1, 1;
@%p0 mbarrier.init.shared.b64 [%r0], %r1;
bar.sync 0;
cvta.param.u64 %l0, %l1;
mov.b32 %r2, 0;
cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r0+128], [%l0, {%r2}], [%r0];
"""


def test_a_tensor_copy_is_issued_by_one_thread_to_an_aligned_address() -> None:
    values = np.zeros(64, np.uint32)
    box = TensorMap(values.ctypes.data, ELEMENTS[2], (64,), (), (64,), 0).encode()
    text = kernel(TMA.replace("%l0, %l1", "%l0, m0"), 1, 32, 1)
    with pytest.raises(NotOneThread):
        run_text(text, [values], maps=[box])
    guarded = text.replace("cp.async", "@%p0 cp.async").replace("[%r0+128]", "[%r0+16]")
    with pytest.raises(BadDescriptor, match="128-byte aligned"):
        run_text(guarded, [values], maps=[box])


def test_what_is_unknown_is_refused_when_it_is_reached() -> None:
    run_text(kernel("bra OUT; tex.2d.v4.f32.f32 %r0, %r1; OUT:"), [])
    with pytest.raises(Unsupported, match="tex.2d"):
        run_text(kernel("tex.2d.v4.f32.f32 %r0, %r1;"), [])


def test_atom_returns_what_was_there() -> None:
    """Lanes add one after another, so that each of them finds another sum."""
    body = """
    ld.param.u64 %in, [p0]; ld.param.u64 %out, [p1];
    atom.global.add.u32 %r0, [%in], 3;
    mad.wide.u32 %at, %thread, 4, %out; st.global.b32 [%at], %r0;
    mov.b32 %r1, 1; shl.b32 %r1, %r1, %lane; mov.u32 %r2, smem;
    setp.eq.u32 %p0, %lane, 0; mov.b32 %r3, 0; @%p0 st.shared.b32 [%r2], %r3; bar.warp.sync -1;
    atom.shared.or.b32 %r4, [%r2], %r1;
    """
    total, found = np.array([5], np.uint32), np.zeros(32, np.uint32)
    run_text(kernel(body, 2), [total, found])
    assert total[0] == 5 + 32 * 3
    assert sorted(found) == [5 + 3 * lane for lane in range(32)]


LOCAL = """
.local .align 4 .b8 padding[4];
.local .align 4 .b8 mine[8];
mov.u64 %l0, mine;
mad.wide.u32 %l1, %a0, 4, %l0;
"""


def test_every_thread_has_local_variables_of_its_own() -> None:
    lanes = np.arange(32, dtype=np.uint32)
    code = f"{LOCAL} st.local.u32 [%l1], %lane; ld.local.u32 %d, [%l0+4];"
    found = run_lanes(code, [lanes % 2])
    assert (found == np.where(lanes % 2 == 1, lanes, 0xFFFFFFFF)).all()


def test_local_memory_ends_and_is_aligned() -> None:
    code = f"{LOCAL} st.local.u32 [%l1], %lane; mov.b32 %d, 0;"
    with pytest.raises(OutOfBounds, match="local memory 8 to 16"):
        run_lanes(code, [np.arange(1, 33, dtype=np.uint32) % 2 + 1])
    with pytest.raises(Misaligned, match="4 bytes of local memory"):
        run_lanes(code.replace("[%l1]", "[%l1+2]"), [np.uint32(0)])
