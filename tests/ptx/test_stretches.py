"""Stretches give every register what single instructions give it, in diverged lanes too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ptx import program
from tests.ptx.program import load
from tests.ptx.snippets import Array, kernel, run_text
from tests.ptx.stretches import find_stretches

REGISTERS = 6
_register = st.integers(0, REGISTERS - 1).map("%r{}".format)
_predicate = st.integers(0, 2).map("%p{}".format)


def _filled(text: str) -> st.SearchStrategy[str]:
    """Every R is a register, every P a predicate."""
    parts = [{"R": _register, "P": _predicate}.get(part, st.just(part)) for part in text]
    return st.tuples(*parts).map("".join)


_COMPUTE = st.sampled_from(
    [
        "add.s32 R, R, R;",
        "mov.u32 R, R;",
        "shl.b32 R, R, 3;",
        "shr.s32 R, R, R;",
        "mul.wide.u32 %l0, R, R; mov.b64 {R, %r6}, %l0;",
        "prmt.b32 R, R, R, 0x5140;",
        "selp.b32 R, R, R, P;",
        "cvt.u16.u32 %h0, R; cvt.u32.u16 R, %h0;",
        "setp.lt.s32 P, R, R;",
        "setp.ne.and.u32 P, R, R, P;",
    ]
).flatmap(_filled)
_GUARD = st.sampled_from(["", "@P ", "@!P "]).flatmap(_filled)


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Guarded instructions between labels, with branches ahead."""
    lines = draw(st.lists(st.tuples(_GUARD, _COMPUTE), min_size=4, max_size=24))
    body = []
    for n, (guard, text) in enumerate(lines):
        body.append(f"L{n}: {guard}{text}")
        if draw(st.integers(0, 3)) == 0:
            target = draw(st.integers(n + 1, len(lines)))
            body.append(draw(_filled(f"@P bra L{target};")))
    return "\n".join([*body, f"L{len(lines)}:"])


def whole(body: str) -> str:
    """The body between loads and stores of all registers; predicates depend on the lane."""
    each = range(REGISTERS)
    loads = "".join(f"ld.global.b32 %r{n}, [%at+{4 * n}];" for n in each)
    stores = "".join(f"st.global.b32 [%at+{4 * n}], %r{n};" for n in each)
    return kernel(
        f"""
        ld.param.u64 %in, [p0];
        mad.wide.u32 %at, %lane, {4 * REGISTERS}, %in;
        {loads}
        {"".join(f"setp.gt.u32 %p{n}, %r{n}, {1 << 30};" for n in range(3))}
        {body}
        {stores}
        """,
        1,
    )


def registers_after(text: str) -> Array:
    values = np.random.default_rng(1).integers(0, 1 << 31, (32, REGISTERS), np.uint32)
    run_text(text, [values])
    return values


@given(programs())
def test_every_register_is_that_of_single_instructions(body: str) -> None:
    text = whole(body)
    found = registers_after(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "find_stretches", lambda steps, _: [None] * len(steps))
        expected = registers_after(f"{text}// one by one")
    assert np.array_equal(found, expected)


def test_stretches_end_at_labels_branches_and_what_others_see() -> None:
    text = whole(
        """
        add.s32 %r0, %r0, %r1;
        add.s32 %r1, %r0, %r1;
        A: add.s32 %r2, %r0, %r1;
        @%p0 add.s32 %r3, %r0, %r1;
        @%p1 bra A;
        add.s32 %r4, %r0, %r1;
        bar.warp.sync -1;
        """
    )
    (found,) = load(text).values()
    counts = [stretch.count for stretch in found.stretches if stretch is not None]
    # Two moves of the lane and the thread, the predicates and the two additions behind the loads.
    assert counts == [2, 5, 2]
    assert find_stretches(found.steps[:1], set()) == [None]


def test_diverged_lanes_keep_what_a_guard_says() -> None:
    """Two stretches of guarded instructions, each in its part of the lanes."""
    found = registers_after(
        whole(
            """
            @%p0 bra B;
            @%p1 mov.u32 %r4, 1;
            @!%p1 mov.u32 %r5, 2;
            bra C;
            B: @%p1 mov.u32 %r4, 3;
            @!%p1 mov.u32 %r5, 4;
            C:
            """
        )
    )
    expected = registers_after(whole(""))
    first, second = (expected[:, n] > 1 << 30 for n in (0, 1))
    expected[:, 4] = np.where(second, np.where(first, 3, 1), expected[:, 4])
    expected[:, 5] = np.where(second, expected[:, 5], np.where(first, 4, 2))
    assert np.array_equal(found, expected)
