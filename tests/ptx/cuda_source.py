"""CUDA C++ kernels in the machine: sources compiled to PTX, recordings executed on the CPU."""

import ctypes
import functools
import importlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4.launch import compiler, recording
from dsv4.launch.constants import device_header
from dsv4.launch.kernel import Defines, Shape
from dsv4.launch.recording import Recording, storage_key
from dsv4.launch.signature import SHARED_HEADERS, Parameter, source_path
from dsv4.launch.target import Target
from dsv4.ops.trees import map_tensors
from tests.ptx.launch import Launch
from tests.ptx.memory import GlobalMemory
from tests.ptx.program import load
from tests.ptx.run import run_launch
from tests.ptx.schedule import SCHEDULES, Choices, Schedule

MULTIPROCESSORS = 148
_FORMATS = {"float": "<f", "int": "<i", "unsigned": "<I", "int64": "<q"}
_ADDRESS_UNIT = 512


@functools.cache
def compile_ptx(source: str, architecture: str, defines: Defines = ()) -> str:
    """PTX of ``dsv4/ops/<source>.cu`` for an architecture such as sm_100a, by NVRTC."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    path = source_path(source)
    text = f'{device_header()}#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}'
    folders = (path.parent, SHARED_HEADERS, *compiler._cuda_headers())
    options = [
        "--std=c++17",
        f"--gpu-architecture={architecture.replace('sm_', 'compute_')}",
        "--device-as-default-execution-space",
        *(f"-I{folder}" for folder in folders),
        *(f"-D{name}={value}" for name, value in defines),
    ]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), path.name.encode(), 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if error:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ValueError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.rstrip(b"\0").decode()


def run_op(
    op: Callable[[Recording], Any],
    tokens: int,
    architecture: str = "sm_100a",
    schedule: Schedule = SCHEDULES["random"],
) -> Any:
    """Records ``op`` on tensors of the CPU, executes its kernels, and returns what ``op`` returned
    with memory in the place of its buffers.

    Buffers are poisoned with 0xFF bytes before they are written. Calls of other functions than
    kernels raise ``ValueError``.
    """
    target = Target(torch.device("cpu"), architecture, MULTIPROCESSORS)
    recorded = Recording(target, tokens)
    result = op(recorded)
    buffers = _Buffers(recorded)
    choices = Choices(schedule)
    for item in recorded.items:
        if not isinstance(item, recording.Launch):
            raise ValueError(f"{item.function} is no kernel")
        shape = item.shape if item.shape_of is None else item.shape_of(tokens)
        if shape is not None:
            _run(item, shape, architecture, buffers, choices)
    return map_tensors(result, buffers.tensor)


class _Buffers:
    """Memory of a recording's buffers."""

    def __init__(self, recorded: Recording):
        self._zeroed = {storage_key(tensor) for tensor in recorded.zeroed_tensors}
        self._memory: dict[int, Tensor] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        """A view of memory in the place of a view of a buffer."""
        if not tensor.is_meta:
            return tensor
        key = storage_key(tensor)
        if key not in self._memory:
            size = tensor.untyped_storage().nbytes()
            memory = torch.full((size + _ADDRESS_UNIT,), 0xFF, dtype=torch.uint8)
            start = -memory.data_ptr() % _ADDRESS_UNIT
            self._memory[key] = memory[start : start + size]
            if key in self._zeroed:
                self._memory[key].zero_()
        whole = self._memory[key].view(tensor.dtype)
        return whole.as_strided(
            tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset()
        )


def _run(
    item: recording.Launch,
    shape: Shape,
    architecture: str,
    buffers: _Buffers,
    choices: Choices,
) -> None:
    arguments: Mapping[str, Any] = {**item.arguments, **shape.numbers}
    memory = GlobalMemory()
    values = []
    for parameter in item.signature.parameters:
        argument = arguments[parameter.name]
        if isinstance(argument, Tensor):
            tensor = buffers.tensor(argument)
            memory.register(parameter.name, *_span(tensor))
            argument = tensor.data_ptr()
        values.append(_bytes(parameter, argument))
    kernel = shape.kernel
    launch = Launch(
        kernel.function,
        shape.grid,
        (shape.threads, 1, 1),
        tuple(values),
        (shape.cluster, 1, 1),
        shape.shared_bytes,
    )
    programs = load(compile_ptx(kernel.source, architecture, kernel.defines))
    run_launch(programs[kernel.function], launch, memory, choices)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _bytes(parameter: Parameter, argument: Any) -> bytes:
    if parameter.pointer:
        return bytes(ctypes.c_uint64(argument or 0))
    return struct.pack(_FORMATS[parameter.type], argument)
