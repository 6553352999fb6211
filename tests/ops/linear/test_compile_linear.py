"""The decode kernel compiles for every target without spills, and within its instruction budget on
Hopper.
"""

import itertools
import re

import pytest

from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.kernel import Defines
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.linear.decode_plan import WARPS, LinearPlan
from dsv4.weights.quant import QuantFormat
from tests.ops.sass import compile_once, count, disassemble, resources, without_an_encoding

NVFP4 = FORMAT_CODE[QuantFormat.NVFP4]
MXFP4 = FORMAT_CODE[QuantFormat.MXFP4]
FP8 = FORMAT_CODE[QuantFormat.FP8_BLOCK128]
BF16 = FORMAT_CODE[QuantFormat.BF16]


def defines(first: int, second: int, tokens: int, norm: bool, ragged: bool) -> Defines:
    plan = LinearPlan(tokens, 4 if tokens == 8 else 1, (1,), 0, 0, 0, 0, ragged, depth=4)
    return (
        ("FORMAT0", first),
        ("FORMAT1", second),
        ("FUSED_NORM", int(norm)),
        ("ALIGNED_X", int(not ragged)),
        *plan.defines,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "formats", [(NVFP4, -1), (FP8, -1), (BF16, -1), (FP8, BF16), (NVFP4, BF16)], ids=str
)
def test_one_token_kernels_do_not_spill(architecture: str, formats: tuple[int, int]) -> None:
    log = compile_once(
        "linear/decode_linear", architecture, defines(*formats, 1, norm=False, ragged=False)
    ).log
    ((registers, spills),) = resources(log).values()
    assert spills == 0
    assert registers <= (112 if architecture == "sm_90a" else 160)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_variant_compiles(ragged: bool) -> None:
    for format, tokens in itertools.product((NVFP4, MXFP4, FP8, BF16), (2, 3, 4, 5, 8)):
        compile_once(
            "linear/decode_linear",
            "sm_90a",
            defines(format, -1, tokens, norm=tokens == 4, ragged=ragged),
        )


@pytest.mark.parametrize(
    "formats", [(NVFP4, -1), (MXFP4, -1), (FP8, -1), (BF16, -1), (FP8, BF16)], ids=str
)
def test_copies_have_an_encoding(formats: tuple[int, int]) -> None:
    for tokens in (1, 5):
        kernel = "linear/decode_linear", "sm_90a", defines(*formats, tokens, False, False)
        sass = disassemble(*kernel)
        assert count(sass, "LDGSTS") > 0
        assert not without_an_encoding(sass)


PAIRS = [(FP8, FP8), (NVFP4, NVFP4), (MXFP4, NVFP4), (BF16, BF16)]


def of_a_pair(first: int, second: int, tokens: int) -> Defines:
    """Flash: 512 columns of x, and 8192 of y, for a thread."""
    return (
        ("FORMAT0", first),
        ("FORMAT1", second),
        ("TOKENS", tokens),
        ("WARPS", WARPS),
        ("DEPTH", 5),
        ("ALIGNED_X", 1),
        ("RAGGED0", 0),
        ("RAGGED1", 0),
        ("PIECES0", 1),
        ("PIECES1", 2),
        ("HOLDS_SLICE1", 1),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("formats", PAIRS, ids=str)
def test_pairs_do_not_spill(architecture: str, formats: tuple[int, int]) -> None:
    for tokens in (1, 2):
        kernel = "linear/decode_pair", architecture, of_a_pair(*formats, tokens)
        ((registers, spills),) = resources(compile_once(*kernel).log).values()
        assert spills == 0
        assert registers <= 128
        sass = disassemble(*kernel)
        assert count(sass, "LDGSTS") > 0
        assert not without_an_encoding(sass)


def test_four_bit_weights_are_decoded_with_few_instructions() -> None:
    """Per MMA (8 weights a lane): 5 logic operations, 4 shifts or products, 2 accumulations."""
    sass = disassemble(
        "linear/decode_linear", "sm_90a", defines(NVFP4, -1, 1, norm=False, ragged=False)
    )
    steps = count(sass, "HMMA")
    assert steps == 16
    assert count(sass, "LDGSTS") > 0
    assert count(sass, "FFMA") <= 2 * steps + 24
    assert len(re.findall(r"LOP3\.LUT \S+ \S+ 0x603f603f", sass)) == steps
    assert len(re.findall(r"LOP3\.LUT .*0x8e008e00", sass)) == 4 * steps


def test_eight_bit_weights_are_read_from_either_half_of_a_register() -> None:
    """Per MMA (8 weights a lane): 4 conversions of two codes, 2 of them of upper halves."""
    sass = disassemble(
        "linear/decode_linear", "sm_90a", defines(FP8, -1, 1, norm=False, ragged=False)
    )
    steps = count(sass, "HMMA")
    assert steps == 8
    assert len(re.findall(r"E4M3\.UNPACK_B \S+ R\d+\S*\.H1", sass)) == 2 * steps
    assert count(sass, "F2FP.F16.E4M3.UNPACK_B") == 4 * steps
