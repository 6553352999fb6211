"""Inputs of single MMA steps, and what the published model says of them.

The inputs follow from names alone. The expected results, float32 ``[M, N]`` by the name of the case
in tests/data/tensor_core.npz, are those of the authors' program: github.com/microsoft/MMA-Sim (MIT)
at c785138, arXiv 2511.10909. ``python -m tests.ptx.tensor_core_cases FOLDER`` computes them again
with a checkout of it, in about three minutes. That program does not take E2M1 operands of
kind::mxf8f6f4: it gets their values as E4M3.
"""

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.ptx.floats import bf16_values
from tests.ptx.tensor_core import E2M1, E4M3, E8M0, ScaleFormat

EXPECTED = Path(__file__).parents[1] / "data" / "tensor_core.npz"
ROWS = 128
COLUMNS = 16
FLAVOURS = (
    *("plain", "wide", "zeros", "small", "cancels", "cancels c", "large c", "whole numbers"),
    "nan and inf",
)
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Element = Literal["bf16", "e4m3", "e2m1"]


class Step(NamedTuple):
    """An instruction; a scale format and its block where it has scales."""

    name: str
    kind: str
    columns: int
    elements: tuple[Element, Element]
    scale: ScaleFormat | None = None
    block: int = 0


STEPS = (
    Step("wgmma", "wgmma", 16, ("bf16", "bf16")),
    Step("f16", "f16", 16, ("bf16", "bf16")),
    Step("mxf8", "mxf8f6f4", 32, ("e4m3", "e4m3"), "ue8m0", 32),
    Step("mxf8 with e2m1", "mxf8f6f4", 32, ("e4m3", "e2m1"), "ue8m0", 32),
    Step("mxf4", "mxf4", 64, ("e2m1", "e2m1"), "ue8m0", 32),
    Step("nvf4", "mxf4nvf4", 64, ("e2m1", "e2m1"), "ue4m3", 16),
)


class Case(NamedTuple):
    """c ``[M, N]``, a ``[M, K]``, b ``[N, K]`` as float32, scale codes ``[., K / block]``."""

    name: str
    step: Step
    c: Floats
    a: Floats
    b: Floats
    scale_a: Bytes
    scale_b: Bytes


def cases() -> Iterator[Case]:
    """Every instruction with every flavour of numbers."""
    for step in STEPS:
        for flavour in FLAVOURS:
            yield _case(step, flavour)


def _case(step: Step, flavour: str) -> Case:
    name = f"{step.name}: {flavour}"
    a = _operand(f"{name} a", (ROWS, step.columns), step.elements[0], flavour)
    b = _operand(f"{name} b", (COLUMNS, step.columns), step.elements[1], flavour)
    if flavour == "cancels":
        half = step.columns // 2
        a[:, half:] = -a[:, :half]
        # Every fourth column of the second half is left different.
        b[:, half:] = np.where(np.arange(half) % 4 == 3, b[:, half:], b[:, :half])
    scale_a = _scales(f"{name} scale a", ROWS, step, flavour)
    scale_b = _scales(f"{name} scale b", COLUMNS, step, flavour)
    with np.errstate(invalid="ignore"):
        sums = _scaled(a, scale_a, step) @ _scaled(b, scale_b, step).T
    return Case(name, step, _accumulator(name, sums, step, flavour), a, b, scale_a, scale_b)


def _bytes(name: str, count: int) -> Bytes:
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(count), np.uint8)


def _words(name: str, shape: tuple[int, int]) -> NDArray[np.uint32]:
    count = shape[0] * shape[1]
    return _bytes(name, 4 * count).view("<u4").reshape(shape).astype(np.uint32)


def _operand(name: str, shape: tuple[int, int], element: Element, flavour: str) -> Floats:
    word = _words(name, shape)
    if element == "bf16":
        values = _bf16(word, flavour)
    elif element == "e4m3":
        codes = (word & 255).astype(np.uint8)
        if flavour == "small":
            codes &= 0x8F
        elif flavour == "plain":
            codes = (codes & 0x9F) + 0x28
        elif flavour == "whole numbers":
            codes = np.where(codes & 1, 0x38, 0x40) | codes & 0x84
        values = np.where(np.isnan(E4M3[codes]) & (flavour != "nan and inf"), 1, E4M3[codes])
    else:
        values = E2M1[word & 15]
        if flavour == "small":
            values = np.where(word >> 16 & 7, np.float32(0), values)
    if flavour == "zeros":
        values = np.where(word >> 16 & 3 != 0, values * np.float32(0), values)
    return values.astype(np.float32)


def _bf16(word: NDArray[np.uint32], flavour: str) -> Floats:
    code = (word & 0xFFFF).astype(np.uint16)
    narrow = code & 0x807F | (120 + (code >> 7 & 15)) << 7
    if flavour == "wide":
        # All exponents in every other row, negative ones in the rest: most sums are finite.
        half = code & 0x807F | code >> 1 & 0x3F80
        finite = np.where(code & 0x7F80 == 0x7F80, narrow, code)
        code = np.where(np.arange(len(code))[:, None] % 2, half, finite)
    elif flavour == "small":
        code = code & 0x807F | (code >> 7 & 1 | (code >> 8 & 1) * 58) << 7
    elif flavour == "nan and inf":
        special = np.where(code & 1, 0x7F80, 0x7FC1) | code & 0x8000
        code = np.where(word >> 16 & 127 == 0, special, narrow)
    elif flavour == "whole numbers":
        return (code.astype(np.int32) % 17 - 8).astype(np.float32)
    else:
        code = narrow
    return bf16_values(code.astype(np.uint16))


def _scales(name: str, rows: int, step: Step, flavour: str) -> Bytes:
    if step.scale is None:
        return np.empty((rows, 0), np.uint8)
    shape = (rows, step.columns // step.block)
    codes = _bytes(name, shape[0] * shape[1]).reshape(shape)
    if step.scale == "ue8m0":
        near = (codes & 15) + 120
        by_flavour = {
            "wide": np.minimum(codes, 254),
            "small": (codes & 7) + 64,
            "nan and inf": np.where(codes < 4, 255, near),
            "whole numbers": codes & 1 | 126,
        }
        return by_flavour.get(flavour, near).astype(np.uint8)
    by_flavour = {
        "small": codes & 0x87,
        "zeros": np.where(codes & 3, codes & 0xFE, 0),
        "nan and inf": np.where(codes < 4, 0x7F, codes & 0x77),
        "whole numbers": codes & 8 | 0x38,
    }
    return by_flavour.get(flavour, np.minimum(codes, 0x7E)).astype(np.uint8)


def _scaled(values: Floats, scale: Bytes, step: Step) -> NDArray[np.float64]:
    if step.scale is None:
        return values.astype(np.float64)
    sizes = E8M0 if step.scale == "ue8m0" else np.abs(E4M3)
    return values * np.repeat(sizes[scale].astype(np.float64), step.block, 1)


def _accumulator(name: str, sums: NDArray[np.float64], step: Step, flavour: str) -> Floats:
    word = _words(f"{name} c", sums.shape).astype(np.int64)
    if flavour == "wide":
        pattern = np.where(word >> 23 & 255 == 255, 0x3F800000, word).astype(np.uint32)
        return pattern.view(np.float32)
    one = np.where(word & 1, -1, 1) * (1 + (word >> 9) / 2.0**23)
    if flavour == "nan and inf":
        # The authors' program ends at an infinite accumulator of 64 columns.
        special = np.where((word & 2 != 0) | (step.columns == 64), np.nan, one * np.inf)
        return np.where(word >> 8 & 63 == 0, special, one).astype(np.float32)
    shift = word >> 1 & 31
    size = np.exp2(np.round(np.log2(np.abs(sums) + 2.0**-149)))
    by_flavour = {
        "zeros": np.where(word & 6, 0 * one, one * size),
        "small": one * np.exp2(-shift) * 2.0 ** (-12 if step.scale == "ue4m3" else -120),
        "cancels c": -sums * (1 + (word & 3) * 2.0**-20),
        "large c": one * size * np.exp2(shift),
        "whole numbers": np.trunc(one * 2.0**19),
    }
    c = by_flavour.get(flavour, one * size * np.exp2(shift // 2 - 8))
    limit = np.finfo(np.float32).max
    return c.clip(-limit, limit).astype(np.float32)


def _published(case: Case) -> Floats:
    """What MMA-Sim, which has to be on the path, makes of a case."""
    torch = importlib.import_module("torch")
    simulator = importlib.import_module("mmasim.simulator.nv_ptx")
    step = case.step
    c = torch.from_numpy(case.c)
    if step.scale is None:
        a, b = (torch.from_numpy(x).bfloat16() for x in (case.a, case.b))
        if step.kind == "f16":
            run = simulator.tcgen05mma("Blackwell", "m128n16k16.f32.bf16.bf16")
            return run(a, b.T, c).numpy()
        run = simulator.wgmma("Hopper", "m64n16k16.f32.bf16.bf16")
        return torch.cat([run(a[i : i + 64], b.T, c[i : i + 64]) for i in (0, 64)]).numpy()
    if step.columns == 32:
        a, b = (torch.from_numpy(x).to(torch.float8_e4m3fn) for x in (case.a, case.b))
        shape = "m128n16k32.block32.f32.e4m3.e4m3"
    else:
        a, b = (torch.from_numpy(_packed(x)) for x in (case.a, case.b))
        shape = f"m128n16k64.block{step.block}.f32.e2m1.e2m1"
    dtype = torch.float8_e8m0fnu if step.scale == "ue8m0" else torch.float8_e4m3fn
    scale_a, scale_b = (torch.from_numpy(x).view(dtype) for x in (case.scale_a, case.scale_b))
    run = simulator.tcgen05mma_block_scale("Blackwell", f"{shape}.{step.scale}")
    return run(a, b.T, c, scale_a, scale_b.T).numpy()


def _packed(values: Floats) -> Bytes:
    size = np.searchsorted(E2M1[:8], np.abs(values))
    codes = (size | np.signbit(values) << 3).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    expected: dict[str, Any] = {case.name: _published(case) for case in cases()}
    np.savez_compressed(EXPECTED, **expected)
