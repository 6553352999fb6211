"""Kernels of ``.cu`` files in the machine: their PTX, and recorded launches on the CPU."""

import functools
import importlib
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.launch.boxes import Boxes
from dsv4.launch.compiler import translation_unit
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Defines, Shape
from dsv4.launch.signature import source_path
from tests.ptx import program
from tests.ptx.launch import Launch as MachineLaunch
from tests.ptx.memory import GlobalMemory
from tests.ptx.run import run_launch
from tests.ptx.schedule import SCHEDULES, Choices, Schedule
from tests.ptx.tensor_map import ELEMENTS, TensorMap
from tests.shared_results import shared

_ELEMENT_CODES = {torch.bfloat16: 10, torch.int32: 3}
_CODES = {"int": "<i", "unsigned": "<I", "int64": "<q", "float": "<f"}


class SourceEdit(NamedTuple):
    """Text of a file in the kernel's folder, or of a header that several have, that becomes another
    one. ``LookupError`` unless it is there once: no test takes that for the fault. ``also``:
    another edit of the same build.
    """

    file: str
    text: str
    replacement: str
    also: "SourceEdit | None" = None

    @property
    def all(self) -> list["SourceEdit"]:
        """This one and those behind it."""
        return [self, *(() if self.also is None else self.also.all)]


def soon(file: str, also: SourceEdit | None = None) -> SourceEdit:
    """The only wait of a file that has an end comes to it within the looks of the machine, whose
    clock counts warp instructions.
    """
    text = "const Deadline deadline"
    return SourceEdit(file, f"{text};", f"{text}{{clock64() + 500}};", also)


@functools.cache
def ptx_of(source: str, architecture: str, defines: Defines, edit: SourceEdit | None = None) -> str:
    """The PTX from which the cubin of ``dsv4/ops/<source>.cu`` is made, or is with an edit.
    (``cuda.core`` gives PTX only where there is a driver.)
    """
    key = ("PTX", source, architecture, defines, edit)
    return shared(key, lambda: _ptx_of(source, architecture, defines, edit))


def _ptx_of(source: str, architecture: str, defines: Defines, edit: SourceEdit | None) -> str:
    # Without the assembler, which takes as long as all before it.
    architecture = architecture.replace("sm_", "compute_")
    if edit is None:
        return _compile(*translation_unit(source, architecture, defines))
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        folder = source_path(source).parent
        # All of them: a header finds others beside itself first.
        headers = (folder.parent / "_device").glob("*.cuh")
        for path in (*folder.glob("*.cu*"), *headers):
            text = path.read_text()
            for one in edit.all:
                if path.name == one.file:
                    if text.count(one.text) != 1:
                        raise LookupError(f"{one}: found {text.count(one.text)} times")
                    text = text.replace(one.text, one.replacement)
            (copy / path.name).write_text(text)
        if not all((copy / one.file).exists() for one in edit.all):
            raise LookupError(f"{edit}: no such file")
        text, options = translation_unit(source, architecture, defines)
        original = source_path(source)
        head = text.removesuffix(original.read_text())
        # Headers of the copy are found in front of those of the folder.
        options.include_path = [name, *options.include_path]
        return _compile(head + (copy / original.name).read_text(), options)


def _compile(text: str, options: Any) -> str:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    flags = options.as_bytes("nvrtc")
    status, unit = nvrtc.nvrtcCreateProgram(text.encode(), options.name.encode(), 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (status,) = nvrtc.nvrtcCompileProgram(unit, len(flags), flags)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, options.name
    _, size = nvrtc.nvrtcGetPTXSize(unit)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(unit, ptx)
    nvrtc.nvrtcDestroyProgram(unit)
    return ptx.rstrip(b"\0").decode()


def map_of(boxes: Boxes, address: int) -> TensorMap:
    """What the driver would encode for a tensor at an address."""
    tensor = boxes.tensor
    return TensorMap(
        address,
        ELEMENTS[_ELEMENT_CODES[tensor.dtype]],
        tuple(reversed(tensor.shape)),
        tuple(stride * tensor.itemsize for stride in reversed(tensor.stride()[:-1])),
        tuple(reversed(boxes.box)),
        3 if boxes.swizzled else 0,
    )


def run_recorded(
    recorded: Launch,
    architecture: str,
    tensors: Mapping[str, Tensor],
    tokens: int,
    schedule: Schedule = SCHEDULES["random"],
    resident: bool = False,
    edit: SourceEdit | None = None,
) -> int:
    """Executes a recorded launch for a number of tokens; returns its warp instructions.

    ``tensors``: memory on the CPU for the launch's tensor arguments, by name, in any dtype of as
    many bytes. ``resident``: all blocks of the grid run at once, as one cluster, where the kernel's
    blocks wait for each other. ``edit`` plants a fault. A fault of the kernel raises its exception
    from ``tests.ptx.faults``.
    """
    shape = recorded.shape if recorded.shape_of is None else recorded.shape_of(tokens)
    assert isinstance(shape, Shape)
    values = {**recorded.arguments, **shape.numbers, **tensors}
    memory = GlobalMemory()
    parameters: list[bytes] = []
    for parameter in recorded.signature.parameters:
        value = values[parameter.name]
        boxes = recorded.arguments.get(parameter.name)
        if isinstance(boxes, Boxes):
            value = tensors.get(parameter.name, boxes.tensor)
            parameters.append(map_of(boxes, value.data_ptr()).encode())
        elif not parameter.pointer:
            parameters.append(struct.pack(_CODES[parameter.type], value))
            continue
        else:
            assert value is None or (isinstance(value, Tensor) and not value.is_meta), value
            parameters.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
        if value is not None:
            storage = value.untyped_storage()
            memory.register(parameter.name, storage.data_ptr(), storage.nbytes())
    kernel = shape.kernel
    ptx = ptx_of(kernel.source, architecture, kernel.defines, edit)
    launch = MachineLaunch(
        kernel.function,
        shape.grid,
        (shape.threads, 1, 1),
        tuple(parameters),
        shape.grid if resident else (shape.cluster, 1, 1),
        shape.shared_bytes,
    )
    return run_launch(program.load(ptx)[kernel.function], launch, memory, Choices(schedule))
