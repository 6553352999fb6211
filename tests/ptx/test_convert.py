"""cvt against torch's conversions, and the order of packed numbers."""

import numpy as np
import pytest
import torch

from dsv4.weights.codes import pack_e2m1
from tests.ptx import floats
from tests.ptx.snippets import run_lanes

F32 = np.float32
ALL_BF16 = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()


def test_bf16_rounds_like_torch() -> None:
    halves = torch.arange(0, 1 << 32, 65521).to(torch.uint32).view(torch.float32)
    expected = halves.bfloat16().view(torch.uint16).numpy()
    found = floats.bf16_bits(halves.numpy())
    number = ~np.isnan(halves.numpy())
    assert np.array_equal(found[number], expected[number])
    assert (found[~number] == 0x7FFF).all()


def test_e4m3_rounds_like_torch_within_its_range() -> None:
    values = ALL_BF16[ALL_BF16.isfinite()]
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(floats.e4m3_codes(values.numpy()), expected)
    assert floats.e4m3_codes(np.array([np.nan], F32))[0] & 0x7F == 0x7F


def test_e2m1_rounds_to_even() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -5.1, 0.26, 100.0])
    packed = pack_e2m1(values.clamp(-6, 6)).numpy()
    codes = floats.e2m1_codes(values.numpy())
    assert np.array_equal(codes[::2] | codes[1::2] << 4, packed)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("cvt.rn.bf16x2.f32 %d, %a0, %a1;", 0x40003F80),
        ("cvt.rn.f16x2.f32 %d, %a0, %a1;", 0x40003C00),
        ("cvt.rn.satfinite.e4m3x2.f32 %h0, %a0, %a1; cvt.u32.u16 %d, %h0;", 0x4038),
        (
            ".reg .b8 byte; cvt.rn.satfinite.e2m1x2.f32 byte, %a0, %a1; cvt.u32.u8 %d, byte;",
            0x42,
        ),
    ],
)
def test_the_first_operand_becomes_the_upper_number(code: str, expected: int) -> None:
    assert (run_lanes(code, [F32(2), F32(1)]) == expected).all()


def test_e4m3_pairs_to_f16() -> None:
    # 0x40 is 2, 0xB8 is -1; the lower byte is the lower number.
    code = "cvt.u16.u32 %h0, %a0; cvt.rn.f16x2.e4m3x2 %d, %h0;"
    assert (run_lanes(code, [np.uint32(0xB840)]) == 0xBC004000).all()


def test_f16_to_f32() -> None:
    code = "mov.b32 {%h0, %h1}, %a0; cvt.f32.f16 %d, %h1;"
    assert (run_lanes(code, [np.uint32(0x3E000000)], F32) == 1.5).all()


@pytest.mark.parametrize(
    ("opcode", "value", "expected"),
    [
        ("cvt.rzi.s32.f32", -2.7, -2),
        ("cvt.rni.s32.f32", 2.5, 2),
        ("cvt.rmi.s32.f32", -2.1, -3),
        ("cvt.rpi.s32.f32", 2.1, 3),
        ("cvt.rzi.s32.f32", 3e9, 2**31 - 1),
        ("cvt.rzi.s32.f32", -3e9, -(2**31)),
        ("cvt.rzi.s32.f32", np.nan, 0),
    ],
)
def test_integers_of_numbers(opcode: str, value: float, expected: int) -> None:
    assert (run_lanes(f"{opcode} %d, %a0;", [F32(value)], np.int32) == expected).all()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("cvt.s64.s32 %d, %a0;", -5),
        ("cvt.u64.u32 %d, %a0;", 2**32 - 5),
        ("cvt.u16.u32 %h0, %a0; cvt.s64.s16 %d, %h0;", -5),
        ("cvt.u16.u32 %h0, %a0; cvt.u64.u16 %d, %h0;", 2**16 - 5),
        ("cvt.s8.s32 %h0, %a0; cvt.s32.s16 %r0, %h0; cvt.s64.s32 %d, %r0;", -5),
    ],
)
def test_integers_are_extended_by_the_sign_of_their_type(code: str, expected: int) -> None:
    assert (run_lanes(code, [np.int32(-5)], np.int64) == expected).all()


@pytest.mark.parametrize(
    ("value", "expected"), [(-1.0, 0.0), (0.25, 0.25), (7.0, 1.0), (np.inf, 1.0), (np.nan, 0.0)]
)
def test_saturation(value: float, expected: float) -> None:
    found = run_lanes("cvt.sat.f32.f32 %d, %a0;", [np.float32(value)], np.float32)
    assert (found == np.float32(expected)).all()
