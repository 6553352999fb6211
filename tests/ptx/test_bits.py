"""Bit fields and bytes against Python's integers."""

import numpy as np
import pytest

from tests.ptx.snippets import run_lanes

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 1 << 32, (3, 32), np.uint32)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (0x3210, 0x44332211),
        (0x7654, 0x88776655),
        (0x0123, 0x11223344),
        (0x5410, 0x66552211),
        # With bit 3 a byte becomes its sign: 0x88 is negative, 0x11 is not.
        (0xF8F8, 0xFF00FF00),
    ],
)
def test_prmt(selector: int, expected: int) -> None:
    found = run_lanes(
        f"prmt.b32 %d, %a0, %a1, {selector};", [np.uint32(0x44332211), np.uint32(0x88776655)]
    )
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("opcode", "position", "length", "value", "expected"),
    [
        ("u32", 4, 8, 0x12345678, 0x67),
        ("u32", 28, 8, 0xF2345678, 0xF),
        ("u32", 40, 8, 0xFFFFFFFF, 0),
        ("u32", 0, 0, 0xFFFFFFFF, 0),
        ("u32", 0, 32, 0x89ABCDEF, 0x89ABCDEF),
        ("s32", 4, 8, 0x00000F80, 0xFFFFFFF8),
        ("s32", 4, 8, 0x00000780, 0x78),
        # Beyond the register a signed field consists of copies of the sign.
        ("s32", 28, 8, 0xF2345678, 0xFFFFFFFF),
        ("s32", 40, 8, 0x80000000, 0xFFFFFFFF),
        ("s32", 8, 0, 0x80000000, 0),
    ],
)
def test_bfe(opcode: str, position: int, length: int, value: int, expected: int) -> None:
    found = run_lanes(f"bfe.{opcode} %d, %a0, {position}, {length};", [np.uint32(value)])
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("position", "length", "expected"),
    [
        (8, 8, 0xFFFFABFF),
        (28, 8, 0xBFFFFFFF),
        (0, 0, 0xFFFFFFFF),
        (0, 32, 0xAB),
        (40, 4, 0xFFFFFFFF),
    ],
)
def test_bfi(position: int, length: int, expected: int) -> None:
    found = run_lanes(
        f"bfi.b32 %d, %a0, %a1, {position}, {length};", [np.uint32(0xAB), np.uint32(0xFFFFFFFF)]
    )
    assert (found == expected).all()


@pytest.mark.parametrize("table", [0xE8, 0x96, 0xCA, 0x01, 0xF0])
def test_lop3(table: int) -> None:
    found = run_lanes(f"lop3.b32 %d, %a0, %a1, %a2, {table};", list(WORDS))
    for a, b, c, result in zip(*WORDS.tolist(), found.tolist(), strict=True):
        bits = [
            table >> (4 * (a >> n & 1) + 2 * (b >> n & 1) + (c >> n & 1)) & 1 for n in range(32)
        ]
        assert result == sum(bit << n for n, bit in enumerate(bits))


@pytest.mark.parametrize(
    ("opcode", "by", "expected"),
    [
        ("shf.l.wrap.b32", 8, 0xDDEEFF11),
        ("shf.r.wrap.b32", 8, 0xFF112233),
        ("shf.l.wrap.b32", 33, 0x99BBDDFE),
        ("shf.l.clamp.b32", 40, 0x11223344),
        ("shf.r.clamp.b32", 40, 0xCCDDEEFF),
        ("shf.l.wrap.b32", 0, 0xCCDDEEFF),
    ],
)
def test_shf(opcode: str, by: int, expected: int) -> None:
    low, high = np.uint32(0x11223344), np.uint32(0xCCDDEEFF)
    assert (run_lanes(f"{opcode} %d, %a0, %a1, {by};", [low, high]) == expected).all()


def test_counts() -> None:
    (values, *_) = WORDS
    values[:2] = (0, 0xFFFFFFFF)
    texts = [f"{value:032b}" for value in values.tolist()]
    ones = run_lanes("popc.b32 %d, %a0;", [values])
    zeros = run_lanes("clz.b32 %d, %a0;", [values])
    turned = run_lanes("brev.b32 %d, %a0;", [values])
    assert ones.tolist() == [text.count("1") for text in texts]
    assert zeros.tolist() == [len(text) - len(text.lstrip("0")) for text in texts]
    assert turned.tolist() == [int(text[::-1], 2) for text in texts]
