"""Every launch of the op benchmark fits on GPUs of 132, 148 and 160 multiprocessors, as data and as
the compiler's report for their architecture.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import dsv4.ops
from dsv4.bench.ops import all_cases
from dsv4.integers import round_up
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Defines, Shape
from dsv4.launch.target import Target
from dsv4.limits import MAX_DECODE_TOKENS
from tests.ops.bench_launches import bench_recordings
from tests.ops.linear.meta import PREFILL_REGISTERS
from tests.ops.recorded import MOST_SHARED_BYTES, limits_exceeded
from tests.ops.sass import compile_once, of_assembler_13_5, resources, static_shared_bytes

pytestmark = pytest.mark.slow

TARGETS = [
    Target(torch.device("cuda", 0), architecture, multiprocessors)
    for architecture, multiprocessors in (("sm_90a", 132), ("sm_100a", 148), ("sm_103a", 160))
]
# The architecture whose program a device gets: no source asks for its own, so that those of the two
# Blackwells differ in their name alone.
PROGRAMS = {"sm_90a": "sm_90a", "sm_100a": "sm_100a", "sm_103a": "sm_100a"}
SOURCES = Path(dsv4.ops.__file__).parent
OPS = sorted({case.op for case in all_cases("")})
REGISTERS = 1 << 16
# The launches of each target, of all ops together.
LEAST_LAUNCHES = 140
# Bytes, stored and loaded, with the assembler of CUDA 13.5: nothing in a decode step, except where
# 1,024 threads have 64 registers each for their part of the vocabulary. By phase, kernel or source.
MOST_SPILLED = {
    "decode": 0,
    "prefill": 80,
    "sample_token": 32,
    # FP8, since lanes that have stored a tile meet again; of 40 loads and stores one is in a stage.
    "linear/prefill_gemm_sm90": 160,
}


class Found(NamedTuple):
    """A launch, one of the cases that it belongs to, and whether a decode step has it."""

    shape: Shape
    case: str
    decodes: bool


@functools.cache
def launches(target: Target, op: str) -> tuple[Found, ...]:
    """The different launches of an op's cases."""
    found: dict[str, Found] = {}
    for case, recordings in bench_recordings(target, op).items():
        for recording in recordings:
            for item in recording.items:
                if isinstance(item, Launch):
                    decodes = recording.tokens <= MAX_DECODE_TOKENS
                    what = Found(item.shape, f"{op}: {case}", decodes)
                    found.setdefault(repr(item.shape), what)
    return tuple(found.values())


def one_of_each_kernel(found: Iterable[Found]) -> list[Found]:
    return list({launch.shape.kernel.function: launch for launch in found}.values())


@functools.cache
def compiled(
    source: str, architecture: str, defines: Defines
) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """(registers, spilled bytes) and static shared memory of every kernel of a source."""
    log = compile_once(source, architecture, defines).log
    return resources(log), static_shared_bytes(log)


class Assembled(NamedTuple):
    """A launch with the registers of a thread, the bytes that it spills, and static shared memory
    of a block.
    """

    launch: Found
    registers: int
    spilled: int
    static: int


def assembled(target: Target, op: str) -> Iterator[Assembled]:
    """All launches for a Blackwell; one of each kernel for the other one, which differ in their
    grids, and for Hopper, where tests run the others.
    """
    found = launches(target, op)
    for launch in found if target.architecture == "sm_100a" else one_of_each_kernel(found):
        kernel = launch.shape.kernel
        used, static = compiled(kernel.source, PROGRAMS[target.architecture], kernel.defines)
        yield Assembled(launch, *used[kernel.function], static[kernel.function])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
def test_launches_are_many_and_stay_within_the_limits_of_a_grid(target: Target) -> None:
    found = [launch for op in OPS for launch in launches(target, op)]
    assert len({repr(launch.shape) for launch in found}) >= LEAST_LAUNCHES
    assert [(launch, what) for launch in found for what in limits_exceeded(launch.shape)] == []
    for shape, case, _ in found:
        # Blocks that wait for all others: one to a multiprocessor.
        if shape.kernel.function == "moe_decode":
            assert shape.grid == (target.multiprocessors, 1, 1), case
            assert 2 * shape.shared_bytes > MOST_SHARED_BYTES, case


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
def test_launches_fit_on_a_multiprocessor(target: Target, op: str) -> None:
    for (shape, case, _), registers, _, static in assembled(target, op):
        kernel = shape.kernel
        what = f"{kernel.function} of {case}"
        # A warp gets its registers by 256.
        assert round_up(registers, 8) * round_up(shape.threads, 32) <= REGISTERS, what
        assert static + shape.shared_bytes <= MOST_SHARED_BYTES, what
        if kernel.source.startswith("linear/prefill_gemm"):
            assert registers == PREFILL_REGISTERS[shape.threads], what


@pytest.mark.sampled(3)
@of_assembler_13_5
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
def test_launches_spill_no_more_than_is_known(target: Target, op: str) -> None:
    for (shape, case, decodes), _, spilled, _ in assembled(target, op):
        kernel = shape.kernel
        known = MOST_SPILLED.keys() & {kernel.function, kernel.source}
        phase = "decode" if decodes else "prefill"
        most = MOST_SPILLED[known.pop() if known else phase]
        assert spilled <= most, f"{kernel.function} of {case}"


def in_eights(
    used: dict[str, tuple[int, int]], static: dict[str, int]
) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """What ``compiled`` gives, with the registers that a thread is given for those it uses."""
    given = {name: (round_up(registers, 8), spilled) for name, (registers, spilled) in used.items()}
    return given, static


@pytest.mark.sampled(3)
@of_assembler_13_5
@pytest.mark.parametrize("op", OPS)
def test_both_blackwells_get_the_same_registers(op: str) -> None:
    """One of each kernel: a program of one name is assembled like that of the other."""
    for shape, case, _ in one_of_each_kernel(launches(TARGETS[2], op)):
        source, defines = shape.kernel.source, shape.kernel.defines
        first, second = (
            in_eights(*compiled(source, name, defines)) for name in ("sm_100a", "sm_103a")
        )
        assert first == second, case


def test_no_source_asks_for_its_architecture() -> None:
    sources = [path for kind in ("*.cu", "*.cuh") for path in SOURCES.rglob(kind)]
    assert len(sources) > 30
    assert [path.name for path in sources if "__CUDA_ARCH" in path.read_text("utf-8")] == []
