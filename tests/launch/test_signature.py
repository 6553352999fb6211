"""Kernel signatures: every kernel of the package is understood, and wrong arguments are named."""

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.launch import signature as module
from dsv4.launch.signature import OPS, Parameter, Signature, entries, signature

FILES = sorted(OPS.glob("*/*.cu*"))
DECLARED = """
// extern "C" __global__ void commented_out(float* x) {}
#include "shared.cuh"
#include <cuda_bf16.h>
  #include "beside.cuh"
#include "common.cuh"
/* extern "C" __global__ void also_commented_out(int a,
   int b) {} */
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1) scale(
    const bf16* __restrict__ x,  // the input, [T, E]
    float *const y,
    const int64 *__restrict__ positions, /* a comment, with a comma */
    const unsigned char* codes,
    unsigned mask, int rows, const int64 stride, float factor) {
  if (rows) { scale_row(x, y); }
}
__global__ void not_an_entry(int a) {}
extern "C" __global__
void nothing() {}
"""
HEADER = """
#pragma once
#include "shared.cuh"
extern "C" __global__ void from_header(const void* bytes) {}
"""
BESIDE = 'extern "C" __global__ void from_beside(int a) {}'
HIDDEN = 'extern "C" __global__ void hidden(int a) {}'
# Sources are remembered by name, so every test has its own.
_NUMBERS = count()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a planted source with ``DECLARED`` and a header beside it, which hides one of the
    same name in the folder of all.
    """
    name = f"planted{next(_NUMBERS)}"
    for folder, header in ((name, HEADER), ("_device", HIDDEN)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared.cuh").write_text(header)
    (tmp_path / name / "kernel.cu").write_text(DECLARED)
    (tmp_path / name / "beside.cuh").write_text(BESIDE)
    # What a header of all includes lies beside that, whatever the op has of the same name.
    (tmp_path / "_device" / "common.cuh").write_text('#include "near.cuh"\n')
    (tmp_path / "_device" / "near.cuh").write_text(BESIDE.replace("beside", "near"))
    (tmp_path / name / "near.cuh").write_text(BESIDE.replace("beside", "afar"))
    monkeypatch.setattr(module, "OPS", tmp_path)
    monkeypatch.setattr(module, "SHARED_HEADERS", tmp_path / "_device")
    return f"{name}/kernel"


def test_parameters_are_read_with_names_types_and_pointers(source: str) -> None:
    found = signature(source, "scale")
    assert found.kernel == "scale"
    assert found.parameters == (
        Parameter("x", "bf16", True, True),
        Parameter("y", "float", True),
        Parameter("positions", "int64", True, True),
        Parameter("codes", "unsigned char", True, True),
        Parameter("mask", "unsigned", False),
        Parameter("rows", "int", False),
        Parameter("stride", "int64", False),
        Parameter("factor", "float", False),
    )


def test_headers_are_searched_and_comments_are_not(source: str) -> None:
    assert signature(source, "nothing").parameters == ()
    assert signature(source, "from_header").parameters == (Parameter("bytes", "void", True, True),)
    for name in ("from_beside", "from_near"):
        assert signature(source, name).parameters == (Parameter("a", "int", False),)
    hidden = ("commented_out", "also_commented_out", "not_an_entry", "scale_row", "hidden")
    for name in (*hidden, "from_afar", "noth"):
        with pytest.raises(KeyError, match=f"kernel.cu: found no .* {name}"):
            signature(source, name)
    assert [one.kernel for one in entries(module.source_path(source))] == ["scale", "nothing"]


def test_a_list_that_does_not_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void broken(int a, (int b)')
    with pytest.raises(ValueError, match="a kernel's parameter list does not end"):
        entries(path)


def arguments(**changes: Any) -> dict[str, Any]:
    """Right arguments of ``scale``, with changes; a change to ``...`` leaves one out."""
    right: dict[str, Any] = {
        "x": torch.empty(4, dtype=torch.bfloat16, device="meta"),
        "y": torch.empty(4, device="meta"),
        "positions": torch.empty(4, dtype=torch.int64, device="meta"),
        "codes": torch.empty(4, dtype=torch.uint8, device="meta"),
        "mask": 1 << 31,
        "rows": 4,
        "stride": 1 << 40,
        "factor": 0.5,
    }
    return {name: value for name, value in {**right, **changes}.items() if value is not ...}


RIGHT = [
    {},
    {"x": None, "y": None},
    {"codes": torch.empty(1, dtype=torch.float8_e4m3fn, device="meta")},
    {"factor": 3},
    {"rows": True},
    {"rows": -(1 << 31), "stride": -(1 << 63), "mask": 0},
    {"rows": (1 << 31) - 1, "stride": (1 << 63) - 1, "mask": (1 << 32) - 1},
]
WRONG = [
    ({"y": ...}, "y: missing"),
    ({"x": ..., "factor": ...}, "x: missing; factor: missing"),
    ({"z": 3}, "z: not an argument"),
    ({"x": torch.empty(4)}, "x: found torch.float32, expected bf16*"),
    ({"y": torch.empty(4).half()}, "y: found torch.float16, expected float*"),
    ({"positions": torch.empty(4).int()}, "positions: found torch.int32, expected int64*"),
    ({"codes": 5}, "codes: found 5, expected a tensor or None (unsigned char*)"),
    ({"rows": torch.zeros(())}, "rows: found tensor(0.), expected int"),
    ({"rows": 1.0}, "rows: found 1.0, expected int"),
    ({"rows": 1 << 31}, "rows: found 2147483648, expected int"),
    ({"rows": None}, "rows: found None, expected int"),
    ({"rows": -(1 << 31) - 1}, "rows: found -2147483649, expected int"),
    ({"mask": -1}, "mask: found -1, expected unsigned"),
    ({"mask": 1 << 32}, "mask: found 4294967296, expected unsigned"),
    ({"stride": 1 << 63}, "stride: found 9223372036854775808, expected int64"),
    ({"stride": -(1 << 63) - 1}, "stride: found -9223372036854775809, expected int64"),
    ({"factor": "x"}, "factor: found 'x', expected a float"),
    ({"factor": None}, "factor: found None, expected a float"),
    ({"y": ..., "z": 1, "rows": 0.5}, "y: missing; z: not an argument; rows: found 0.5"),
]


@pytest.mark.parametrize("changes", RIGHT)
def test_right_arguments_pass(source: str, changes: dict[str, Any]) -> None:
    signature(source, "scale").check(arguments(**changes))


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_arguments_are_named(source: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^scale: {re.escape(message)}"):
        signature(source, "scale").check(arguments(**changes))


def test_unsigned_words_may_be_of_either_type_and_numbers_of_one() -> None:
    words = torch.empty(4, dtype=torch.uint32, device="meta")
    for tensor in (words, words.view(torch.int32)):
        assert Parameter("x", "unsigned", True).problem(tensor) is None
    assert Parameter("x", "int", True).problem(words) == "found torch.uint32, expected int*"


TAKEN = {
    "bf16": {torch.bfloat16},
    "float": {torch.float32},
    "int64": {torch.int64},
    "int": {torch.int32},
    "unsigned": {torch.int32, torch.uint32},
    "settled_float": {torch.float32},
    "settled_int64": {torch.int64},
}
DTYPES = {*set().union(*TAKEN.values()), torch.float16, torch.float64, torch.int8, torch.uint64}


@pytest.mark.parametrize("pointee", TAKEN)
def test_a_pointer_takes_values_of_its_type_alone(pointee: str) -> None:
    parameter = Parameter("x", pointee, True)
    taken = {
        dtype
        for dtype in DTYPES
        if parameter.problem(torch.empty(1, dtype=dtype, device="meta")) is None
    }
    assert taken == TAKEN[pointee]
    assert parameter.read_early == pointee.startswith("settled_")


def test_arguments_go_to_a_kernel_of_the_same_parameters_read_early_or_not() -> None:
    def of(*parameters: Parameter) -> Signature:
        return Signature("kernel", parameters)

    own = of(Parameter("x", "int64", True, True), Parameter("n", "int", False))
    for same in (own, of(Parameter("x", "settled_int64", True), Parameter("n", "int", False))):
        assert own.takes_arguments_of(same)
        assert same.takes_arguments_of(own)
    others = [
        of(Parameter("n", "int", False), Parameter("x", "int64", True)),
        of(Parameter("y", "int64", True), Parameter("n", "int", False)),
        of(Parameter("x", "float", True), Parameter("n", "int", False)),
        of(Parameter("x", "int64", False), Parameter("n", "int", False)),
        of(Parameter("x", "int64", True)),
    ]
    assert not any(own.takes_arguments_of(other) for other in others)


def test_there_are_kernels() -> None:
    assert sum(len(entries(path)) for path in FILES) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_kernel_of_the_package_is_understood(path: Path) -> None:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = entries(path)
    assert len(found) == len(re.findall(r'extern\s+"C"\s+__global__', text))
    assert len({kernel.kernel for kernel in found}) == len(found)
    for kernel in found:
        assert kernel.kernel.isidentifier()
        names = [parameter.name for parameter in kernel.parameters]
        assert all(name.isidentifier() for name in names)
        assert len(set(names)) == len(names)
        scalars = {parameter.type for parameter in kernel.parameters if not parameter.pointer}
        assert scalars <= {"int", "unsigned", "int64", "float", "TensorMap"}, kernel.kernel


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.suffix == ".cu"],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_kernel_is_found_by_its_source(path: Path) -> None:
    for kernel in entries(path):
        found = signature(f"{path.parent.name}/{path.stem}", kernel.kernel)
        assert isinstance(found, Signature)
        assert found == kernel
