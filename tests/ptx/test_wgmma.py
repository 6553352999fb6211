"""wgmma with both operands in shared memory, with rows along the summed dimension and across it."""

import numpy as np
import pytest
import torch

from tests.ptx.snippets import kernel, run_text
from tests.ptx.wgmma import sums_of_registers

COLUMNS, DEPTH = 128, 16
SUMS = COLUMNS // 2
# Rows of 128 bytes, in groups of eight; a at 0, blocks of 64 columns of b behind it.
ROW, B = 128, 64 * 128
BLOCK = DEPTH * ROW
SWIZZLE = 1 << 62 | 8 * ROW >> 4 << 32
FIRST = SWIZZLE
SECOND = SWIZZLE | BLOCK >> 4 << 16 | B >> 4
WORDS = (B + 2 * BLOCK) // 4


def body(turned: bool) -> str:
    sums = [f"%f{n}" for n in range(SUMS)]
    copies = "".join(
        f"ld.global.b32 %r1, [%in+{at}]; st.shared.b32 [%r0+{at}], %r1;"
        for at in range(0, 4 * WORDS, 4 * 128)
    )
    stores = "".join(f"st.global.f32 [%at+{4 * n}], {name};" for n, name in enumerate(sums))
    zeros = "".join(f"mov.f32 {name}, 0f7FFFFFFF;" for name in sums)
    return f"""
    .reg .f32 %f<{SUMS}>;
    ld.param.u64 %in, [p0];
    mad.wide.u32 %in, %thread, 4, %in;
    mov.u32 %r0, smem;
    mad.lo.u32 %r0, %thread, 4, %r0;
    {copies}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    {zeros}
    mov.u32 %r2, smem;
    shr.u32 %r2, %r2, 4;
    cvt.u64.u32 %l2, %r2;
    add.u64 %l0, %l2, {FIRST};
    add.u64 %l1, %l2, {SECOND};
    setp.eq.u32 %p1, %thread, 1000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.bf16.bf16
        {{{", ".join(sums)}}}, %l0, %l1, %p1, 1, 1, {int(turned)}, 1;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %out, [p1];
    mad.wide.u32 %at, %thread, {4 * SUMS}, %out;
    {stores}
    """


def placed(memory: torch.Tensor, start: int, rows: torch.Tensor) -> None:
    """Rows of at most 64 values, with their pieces of 8 exchanged by the row's number."""
    for n, row in enumerate(rows):
        for piece, values in enumerate(row.split(8)):
            at = start // 2 + n * ROW // 2 + (piece ^ n % 8) * 8
            memory[at : at + 8] = values


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_operands_in_shared_memory(swapped: bool, turned: bool) -> None:
    """``turned``: the rows of a are those of its transpose."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-8, 8, (64, DEPTH), generator=generator).bfloat16()
    b = torch.randint(-8, 8, (DEPTH, COLUMNS), generator=generator).bfloat16()
    memory = torch.full((2 * WORDS,), torch.nan, dtype=torch.bfloat16)
    placed(memory, 0, a.T if turned else a)
    for n, block in enumerate(b.split(64, dim=1)):
        placed(memory, B + (n ^ swapped) * BLOCK, block)
    found = np.zeros((128, SUMS), np.float32)
    words = memory.view(torch.int32).numpy()
    run_text(kernel(body(turned), 2, 128), [words, found], 128, shared_bytes=4 * WORDS)
    sums = np.concatenate([sums_of_registers(warp.T) for warp in found.reshape(4, 32, SUMS)])
    assert np.array_equal(sums, (a.double() @ b.double()).numpy()) is not swapped
