"""Integers, floating-point numbers, predicates and shifts where it is easy to be wrong."""

import numpy as np
import pytest

from tests.ptx.snippets import run_lanes

F32 = np.float32


@pytest.mark.parametrize(
    ("opcode", "value", "by", "expected"),
    [
        ("shl.b32", 0xFFFFFFFF, 31, 0x80000000),
        ("shl.b32", 0xFFFFFFFF, 32, 0),
        ("shr.u32", 0xFFFFFFFF, 40, 0),
        ("shr.s32", 0x80000000, 4, 0xF8000000),
        ("shr.s32", 0x80000000, 99, 0xFFFFFFFF),
        ("shr.s32", 0x7FFFFFFF, 99, 0),
    ],
)
def test_shifts_beyond_the_width(opcode: str, value: int, by: int, expected: int) -> None:
    found = run_lanes(f"{opcode} %d, %a0, %a1;", [np.uint32(value), np.uint32(by)])
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("code", "x", "y", "expected"),
    [
        ("div.s32 %d, %a0, %a1;", -7, 2, -3),
        ("rem.s32 %d, %a0, %a1;", -7, 2, -1),
        ("div.s32 %d, %a0, %a1;", 7, -2, -3),
        ("rem.s32 %d, %a0, %a1;", 7, -2, 1),
        ("div.u32 %d, %a0, %a1;", -7, 2, 0x7FFFFFFC),
        ("mul.lo.s32 %d, %a0, %a1;", 1 << 30, 6, -(1 << 31)),
        ("mul.hi.u32 %d, %a0, %a1;", -1, -1, -2),
        ("mul.hi.s32 %d, %a0, %a1;", -1, 5, -1),
        ("mad.lo.s32 %d, %a0, %a1, %a1;", -3, 5, -10),
        ("min.s32 %d, %a0, %a1;", -1, 1, -1),
        ("min.u32 %d, %a0, %a1;", -1, 1, 1),
        ("sub.s32 %d, %a0, %a1;", -(1 << 31), 1, (1 << 31) - 1),
        ("max.u16x2 %d, %a0, %a1;", 0x0001FFFF, 0x00028000, 0x0002FFFF),
        ("max.s16x2 %d, %a0, %a1;", 0x0001FFFF, 0x00028000, 0x0002FFFF),
        ("min.s16x2 %d, %a0, %a1;", 0x00010001, 0x00028000, 0x00018000),
    ],
)
def test_integers(code: str, x: int, y: int, expected: int) -> None:
    assert (run_lanes(code, [np.int32(x), np.int32(y)], np.int32) == expected).all()


@pytest.mark.parametrize(("opcode", "expected"), [("s32", -15), ("u32", 5 * (2**32 - 3))])
def test_wide_products_have_the_sign_of_their_type(opcode: str, expected: int) -> None:
    found = run_lanes(f"mul.wide.{opcode} %d, %a0, %a1;", [np.int32(-3), np.int32(5)], np.int64)
    assert (found == expected).all()


def test_fma_of_doubles_rounds_once() -> None:
    x = np.float64(1 + 2.0**-30)
    code = "fma.rn.f64 %d, %a0, %a0, %a1;"
    found = run_lanes(code, [x, np.float64(-(1 + 2.0**-29))], np.float64)
    assert (found == 2.0**-60).all(), "the product is not rounded"
    assert np.isnan(run_lanes(code, [x, np.float64(np.nan)], np.float64)).all()


def test_reciprocals_of_doubles_are_approximate() -> None:
    x = np.float64(3 + 2.0**-40)
    found = run_lanes("rcp.approx.ftz.f64 %d, %a0;", [x], np.float64)
    assert ((found.view(np.uint64) & 0xFFFFFFFF) == 0).all()
    assert (np.abs(found * x - 1) < 2.0**-19).all()


def test_fma_rounds_once() -> None:
    x = F32(1 + 2.0**-12)
    # The product is 1 + 2^-11 + 2^-24, a tie of float32 that the addend breaks.
    for addend in (2.0**-60, -(2.0**-60)):
        found = run_lanes("fma.rn.f32 %d, %a0, %a0, %a1;", [x, F32(addend)], F32)
        up = F32(1 + 2.0**-11 + 2.0**-23)
        assert (found == (up if addend > 0 else F32(1 + 2.0**-11))).all()


@pytest.mark.parametrize(
    ("opcode", "x", "y", "expected"),
    [
        ("min.f32", np.nan, 2.0, 2.0),
        ("max.f32", 2.0, np.nan, 2.0),
        ("max.NaN.f32", 2.0, np.nan, np.nan),
        ("min.f32", 0.0, -0.0, -0.0),
        ("max.f32", -0.0, 0.0, 0.0),
    ],
)
def test_extremes(opcode: str, x: float, y: float, expected: float) -> None:
    found = run_lanes(f"{opcode} %d, %a0, %a1;", [F32(x), F32(y)], F32)
    assert np.array_equal(found, np.full(32, expected, F32), equal_nan=True)
    assert (np.signbit(found) == np.signbit(expected)).all()


@pytest.mark.parametrize(
    ("opcode", "x", "y", "expected"),
    [
        ("setp.lt.s32", -1, 1, True),
        ("setp.lt.u32", -1, 1, False),
        ("setp.lo.u32", 1, -1, True),
        ("setp.ne.b32", 5, 5, False),
    ],
)
def test_comparisons(opcode: str, x: int, y: int, expected: bool) -> None:
    code = f"{opcode} %p0, %a0, %a1; selp.b32 %d, 1, 0, %p0;"
    assert (run_lanes(code, [np.int32(x), np.int32(y)]) == expected).all()


@pytest.mark.parametrize(
    ("relation", "expected"),
    [("eq", 0), ("ne", 0), ("neu", 1), ("equ", 1), ("lt", 0), ("ltu", 1), ("num", 0), ("nan", 1)],
)
def test_comparisons_with_nan(relation: str, expected: int) -> None:
    code = f"setp.{relation}.f32 %p0, %a0, %a1; selp.b32 %d, 1, 0, %p0;"
    assert (run_lanes(code, [F32(np.nan), F32(1)]) == expected).all()


def test_joined_predicates() -> None:
    code = """
    setp.lt.u32 %p0, %a0, 20;
    setp.gt.and.u32 %p1, %a0, 9, %p0;
    setp.eq.or.u32 %p2, %a0, 31, %p1;
    not.pred %p3, %p2;
    selp.b32 %d, 7, 3, %p3;
    """
    lanes = np.arange(32, dtype=np.uint32)
    inside = ((lanes > 9) & (lanes < 20)) | (lanes == 31)
    assert (run_lanes(code, [lanes]) == np.where(inside, 3, 7)).all()


def test_guards_change_only_their_lanes() -> None:
    code = """
    mov.b32 %d, 1;
    setp.lt.u32 %p0, %lane, 5;
    @%p0 mov.b32 %d, 2;
    @!%p0 add.s32 %d, %d, 9;
    """
    assert run_lanes(code, []).tolist() == [2] * 5 + [10] * 27


def test_registers_are_poisoned() -> None:
    assert (run_lanes("mov.b32 %d, %r7;", []) == 0xFFFFFFFF).all()


def test_packed_products_of_bf16() -> None:
    # 1.5 · 3 in the upper half, 2 · 0.5 in the lower one.
    found = run_lanes("mul.rn.bf16x2 %d, %a0, %a1;", [np.uint32(0x3FC04000), np.uint32(0x40403F00)])
    assert (found == 0x40903F80).all()


def test_lanes_loop_on_their_own() -> None:
    code = """
    mov.b32 %d, 0;
    and.b32 %r0, %lane, 7;
    LOOP:
    setp.eq.b32 %p0, %r0, 0;
    @%p0 bra OUT;
    add.s32 %d, %d, %lane;
    sub.s32 %r0, %r0, 1;
    bra LOOP;
    OUT:
    add.s32 %d, %d, 1000;
    """
    lanes = np.arange(32)
    assert (run_lanes(code, []) == 1000 + lanes * (lanes % 8)).all()


def test_numbers_between_registers() -> None:
    code = """
    mov.b64 %l0, {%a0, %a1};
    shr.u64 %l0, %l0, 16;
    mov.b64 {%r0, _}, %l0;
    mov.b32 {%h0, %h1}, %r0;
    cvt.u32.u16 %r1, %h1;
    cvt.u32.u16 %r2, %h0;
    shl.b32 %r1, %r1, 8;
    add.s32 %d, %r1, %r2;
    """
    found = run_lanes(code, [np.uint32(0x11112222), np.uint32(0x33334444)])
    assert (found == (0x4444 << 8) + 0x1111).all()
