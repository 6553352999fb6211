"""mma.sync: registers of the operands, formats, and the sum of a step."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptx.floats import bf16_bits
from tests.ptx.snippets import kernel, run_text

Array = NDArray[Any]


def f16_bits(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint16)


def product(kind: str, c: Array, a: Array, b: Array) -> Array:
    """``c + a b`` of float32 ``[16, 8]``, ``[16, 16]`` and ``[16, 8]``, by one warp."""
    bits = f16_bits if kind == "f16" else bf16_bits
    lane = np.arange(32)
    row, pair = lane // 4, 2 * (lane % 4)
    a_places = [(row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8)]
    words_a = [_pair(bits(a[r, k]), bits(a[r, k + 1])) for r, k in a_places]
    words_b = [_pair(bits(b[k, row]), bits(b[k + 1, row])) for k in (pair, pair + 8)]
    c_places = [(r, pair + n) for r in (row, row + 8) for n in (0, 1)]
    words_c = [c[place].view(np.uint32) for place in c_places]
    words = np.stack([*words_a, *words_b, *words_c], 1).astype(np.uint32)
    text = f"""
    ld.param.u64 %in, [p0];
    mad.wide.u32 %at, %lane, 40, %in;
    {" ".join(f"ld.global.b32 %r{n}, [%at+{4 * n}];" for n in range(10))}
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {{%r10, %r11, %r12, %r13}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%r6, %r7, %r8, %r9}};
    ld.param.u64 %out, [p1];
    mad.wide.u32 %at, %lane, 16, %out;
    st.global.v4.b32 [%at], {{%r10, %r11, %r12, %r13}};
    """
    result = np.zeros((32, 4), np.float32)
    run_text(kernel(text, 2), [words, result])
    found = np.zeros((16, 8), np.float32)
    for n, place in enumerate(c_places):
        found[place] = result[:, n]
    return found


def _pair(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_integers(kind: str) -> None:
    random = np.random.default_rng(0)
    shapes = ((16, 8), (16, 16), (16, 8))
    c, a, b = (random.integers(-9, 10, shape).astype(np.float32) for shape in shapes)
    assert np.array_equal(product(kind, c, a, b), c + a @ b)


def test_a_sum_is_cut_25_places_below_its_largest_term() -> None:
    zeros = np.zeros((16, 8), np.float32), np.zeros((16, 16), np.float32)
    c, a, b = zeros[0].copy(), zeros[1], zeros[0].copy()
    c[:] = 1
    a[:, :2] = 2.0**-12
    b[:2] = 2.0**-12
    # Two terms of 2^-24 are the last place of 1, one alone is lost.
    assert (product("f16", c, a, b) == np.float32(1 + 2.0**-23)).all()
    b[1] = 0
    assert (product("f16", c, a, b) == 1).all()


def test_subnormal_f16() -> None:
    c = np.zeros((16, 8), np.float32)
    a = np.full((16, 16), 2.0**-24, np.float32)
    b = np.full((16, 8), 3 * 2.0**-24, np.float32)
    assert (product("f16", c, a, b) == np.float32(48 * 2.0**-48)).all()
