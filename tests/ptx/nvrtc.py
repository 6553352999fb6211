"""Kernels of ``.cu`` files in the machine: their PTX, and recorded launches on the CPU."""

import functools
import importlib
import struct
from collections.abc import Mapping

from torch import Tensor

from dsv4.launch.compiler import translation_unit
from dsv4.launch.kernel import Defines, Shape
from dsv4.launch.recording import Launch
from tests.ptx import program
from tests.ptx.edits import Edit, unchanged
from tests.ptx.launch import Launch as MachineLaunch
from tests.ptx.memory import GlobalMemory
from tests.ptx.run import run_launch
from tests.ptx.schedule import SCHEDULES, Choices, Schedule

_CODES = {"int": "<i", "unsigned": "<I", "int64": "<q", "float": "<f"}


@functools.cache
def ptx_of(source: str, architecture: str, defines: Defines) -> str:
    """The PTX from which the cubin of ``dsv4/ops/<source>.cu`` is made. (``cuda.core`` gives PTX
    only where there is a driver.)
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    text, options = translation_unit(source, architecture, defines)
    flags = options.as_bytes("nvrtc")
    status, unit = nvrtc.nvrtcCreateProgram(text.encode(), options.name.encode(), 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (status,) = nvrtc.nvrtcCompileProgram(unit, len(flags), flags)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, source
    _, size = nvrtc.nvrtcGetPTXSize(unit)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(unit, ptx)
    nvrtc.nvrtcDestroyProgram(unit)
    return ptx.rstrip(b"\0").decode()


def run_recorded(
    recorded: Launch,
    architecture: str,
    tensors: Mapping[str, Tensor],
    tokens: int,
    schedule: Schedule = SCHEDULES["random"],
    resident: bool = False,
    edit: Edit = unchanged,
) -> int:
    """Executes a recorded launch for a number of tokens; returns its warp instructions.

    ``tensors``: memory on the CPU for the launch's tensor arguments, by name, in any dtype of as
    many bytes. ``resident``: all blocks of the grid run at once, as one cluster, where the kernel's
    blocks wait for each other. ``edit`` is made in the PTX. A fault of the kernel raises its
    exception from ``tests.ptx.faults``.
    """
    shape = recorded.shape if recorded.shape_of is None else recorded.shape_of(tokens)
    assert isinstance(shape, Shape)
    values = {**recorded.arguments, **shape.numbers, **tensors}
    memory = GlobalMemory()
    parameters: list[bytes] = []
    for parameter in recorded.signature.parameters:
        value = values[parameter.name]
        if not parameter.pointer:
            parameters.append(struct.pack(_CODES[parameter.type], value))
            continue
        assert value is None or (isinstance(value, Tensor) and not value.is_meta), parameter.name
        parameters.append(struct.pack("<Q", 0 if value is None else value.data_ptr()))
        if value is not None:
            storage = value.untyped_storage()
            memory.register(parameter.name, storage.data_ptr(), storage.nbytes())
    kernel = shape.kernel
    ptx = edit(ptx_of(kernel.source, architecture, kernel.defines))
    launch = MachineLaunch(
        kernel.function,
        shape.grid,
        (shape.threads, 1, 1),
        tuple(parameters),
        shape.grid if resident else (shape.cluster, 1, 1),
        shape.shared_bytes,
    )
    return run_launch(program.load(ptx)[kernel.function], launch, memory, Choices(schedule))
