"""The arithmetic of tensor cores against the vectors of its published model."""

import numpy as np
import pytest
import torch

from tests.ptx.floats import bf16_bits, bf16_values
from tests.ptx.tensor_core import (
    BF16,
    E2M1,
    E4M3,
    E8M0,
    block_scaled_mma,
    e2m1_values,
    mma_16_bit,
)
from tests.ptx.tensor_core_cases import EXPECTED, FLAVOURS, STEPS, Case, cases

SPECIAL = 0x7FFFFFFF


def mma_bf16(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return mma_16_bit(c, *(BF16.factor(bf16_bits(operand)) for operand in (a, b)))


def result(case: Case) -> np.ndarray:
    if case.step.scale is None:
        return mma_bf16(case.c, case.a, case.b)
    scales = (case.scale_a, case.scale_b)
    return block_scaled_mma(case.c, case.a, case.b, *scales, case.step.kind, case.step.scale)


def test_every_bit_is_that_of_the_published_model() -> None:
    entries = 0
    with np.load(EXPECTED) as expected:
        assert len(expected.files) == len(STEPS) * len(FLAVOURS)
        for case in cases():
            wanted = expected[case.name]
            different = result(case).view(np.uint32) != wanted.view(np.uint32)
            assert np.count_nonzero(different) == 0, case.name
            entries += wanted.size
    assert entries >= 100_000


def test_the_vectors_hold_what_is_hard() -> None:
    with np.load(EXPECTED) as expected:
        values = np.concatenate([expected[name].ravel() for name in expected.files])
    assert np.unique(values[np.isnan(values)].view(np.uint32)).tolist() == [SPECIAL]
    size = np.abs(values)
    assert np.count_nonzero(np.isinf(size)) > 500
    assert np.count_nonzero((size > 0) & (size < 2.0**-126)) > 4000
    assert np.count_nonzero(size == 0) > 2000


@pytest.mark.parametrize("kind", ["bf16", "mxf8f6f4", "mxf4nvf4"])
def test_whole_numbers_are_summed_exactly(kind: str) -> None:
    random = np.random.default_rng(0)
    a = random.choice(np.array([-4, -3, -2, -1, 0, 1, 2, 3, 4], np.float32), (40, 256))
    b = random.choice(np.array([-6, -2, 0, 1, 3, 6], np.float32), (24, 256))
    c = random.integers(-1000, 1000, (40, 24)).astype(np.float32)
    if kind == "bf16":
        got = mma_bf16(c, a, b)
    else:
        ones = (np.full((40, 8), 127, np.uint8), np.full((24, 8), 127, np.uint8))
        got = block_scaled_mma(c, a, b, *ones, kind)
    assert np.array_equal(got, c + a @ b.T)


def test_a_row_does_not_depend_on_the_others() -> None:
    for case in cases():
        alone = case._replace(
            c=case.c[5:8, ::3],
            a=case.a[5:8],
            b=case.b[::3],
            scale_a=case.scale_a[5:8],
            scale_b=case.scale_b[::3],
        )
        together = result(case)[5:8, ::3].view(np.uint32)
        assert np.array_equal(result(alone).view(np.uint32), together)


def test_codes_mean_what_torch_says() -> None:
    code = torch.arange(256, dtype=torch.uint8)
    for values, dtype in ((E4M3, torch.float8_e4m3fn), (E8M0, torch.float8_e8m0fnu)):
        np.testing.assert_array_equal(values, code.view(dtype).float().numpy())
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = bf16.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bf16_values(codes), bf16.float().numpy())
    assert e2m1_values(np.array([[0x92, 0xF7]], np.uint8)).tolist() == [[1, -0.5, 6, -6]]
    assert E2M1[8:].tolist() == (-E2M1[:8]).tolist()


def test_a_zero_is_positive() -> None:
    zero = np.full((1, 1), -0.0, np.float32)
    a = np.full((1, 16), -0.0, np.float32)
    assert mma_bf16(zero, a, a + 1).view(np.uint32).item() == 0
    a[0, 3] = -(2.0**-75)
    # -2^-150 is kept by the sum and lost by float32.
    assert mma_bf16(zero, a, -a).view(np.uint32).item() == 0


def test_parts_of_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="24 columns are no multiple of 16"):
        mma_bf16(np.zeros((1, 1)), np.zeros((1, 24)), np.zeros((1, 24)))
