"""Executes compiled kernels: the host function, then every kernel that it launches."""

import ctypes
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.ptx import program
from tests.ptx.cluster import Cluster
from tests.ptx.driver import RecordingDriver
from tests.ptx.faults import Fault
from tests.ptx.host import HostObject
from tests.ptx.launch import Launch
from tests.ptx.memory import GlobalMemory
from tests.ptx.schedule import SCHEDULES, Choices, Schedule

_CUDA = 2
_KINDS = {"i": 0, "u": 1, "f": 2}
_BFLOAT = 4
_INTEGER = 1
_FLOAT = 3
_TENSOR = 7
Argument = torch.Tensor | np.ndarray | int | float | None


class CompiledKernel(NamedTuple):
    """PTX and host object of a compiled CuTe DSL function."""

    ptx: str
    object: bytes
    function: str

    @classmethod
    def of(cls, compiled: Any, function: str = "gemm") -> "CompiledKernel":
        """From what ``cute.compile`` returned with ``--enable-tvm-ffi --keep-ptx``."""
        if not compiled.__ptx__:
            raise ValueError("the kernel was compiled without --keep-ptx")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            compiled.export_to_c(str(path), function)
            return cls(compiled.__ptx__, path.read_bytes(), function)


@dataclass(frozen=True)
class Execution:
    """What ran: the launches in their order, and warp instructions of all of them."""

    launches: tuple[Launch, ...]
    instructions: int


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    _fields_ = (
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
    )


def run_kernel(
    compiled: CompiledKernel,
    arguments: Sequence[Argument],
    schedule: Schedule = SCHEDULES["random"],
    blocks: int | None = None,
) -> Execution:
    """Calls the host function and executes what it launches; results are in the arguments.

    Tensors (torch on the CPU, or numpy arrays) stand for tensors on the device; kernels may touch
    their bytes and nothing else. None stands for an operand that the kernel was compiled without.
    The stream that the function takes from its environment is no argument. ``blocks``: no launch
    has more, as if the device had no room for them. A fault of the kernel raises its exception from
    ``tests.ptx.faults``.
    """
    launches = record_launches(compiled, arguments)
    if blocks is not None:
        launches = tuple(_cut(launch, blocks) for launch in launches)
    memory = GlobalMemory()
    for n, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            memory.register(f"argument {n}", argument.data_ptr(), _bytes_spanned(argument))
        elif isinstance(argument, np.ndarray):
            memory.register(f"argument {n}", argument.ctypes.data, argument.nbytes)
    choices = Choices(schedule)
    programs = program.load(compiled.ptx)
    executed = sum(
        run_launch(programs[launch.kernel], launch, memory, choices) for launch in launches
    )
    return Execution(launches, executed)


def _cut(launch: Launch, blocks: int) -> Launch:
    across, *rest = launch.grid
    assert rest == [1, 1]
    assert blocks % launch.cluster[0] == 0
    return replace(launch, grid=(min(across, blocks), 1, 1))


def _bytes_spanned(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def run_launch(
    kernel: program.Program, launch: Launch, memory: GlobalMemory, choices: Choices
) -> int:
    """Executes one launch; returns its warp instructions."""
    for name, table in kernel.layout.tables.items():
        memory.register(name, table.ctypes.data, table.nbytes)
    cluster = Cluster(kernel, launch, memory, choices)
    counts = [g // c for g, c in zip(launch.grid, launch.cluster, strict=True)]
    for index in choices.shuffled(list(np.ndindex(*counts))):
        x, y, z = (i * c for i, c in zip(index, launch.cluster, strict=True))
        # Infinities and NaN are results like others.
        with np.errstate(all="ignore"):
            cluster.run((x, y, z))
    return cluster.executed


def record_launches(compiled: CompiledKernel, arguments: Sequence[Argument]) -> tuple[Launch, ...]:
    """Calls the host function with a driver that only writes down what it is asked to launch."""
    functions = program.load(compiled.ptx)
    driver = RecordingDriver(
        {
            name: [size for _, size in loaded.function.parameters]
            for name, loaded in functions.items()
        }
    )
    host = HostObject(compiled.object, driver.symbols)
    packed = (_Any * len(arguments))()
    kept: list[Any] = []
    for slot, argument in zip(packed, arguments, strict=True):
        if argument is None:
            continue
        if isinstance(argument, torch.Tensor | np.ndarray):
            tensor = _dl_tensor(argument, kept)
            slot.type_index = _TENSOR
            slot.value = ctypes.addressof(tensor)
        elif isinstance(argument, int):
            slot.type_index = _INTEGER
            slot.value = argument & (1 << 64) - 1
        else:
            slot.type_index = _FLOAT
            (slot.value,) = struct.unpack("<Q", struct.pack("<d", argument))
    result = _Any()
    signature = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
    )
    function = signature(host.symbols[f"__tvm_ffi_{compiled.function}"])
    code = function(None, ctypes.addressof(packed), len(arguments), ctypes.addressof(result))
    if code or driver.errors:
        raise Fault(f"the host function ends with {code}: {'; '.join(driver.errors)}")
    return tuple(driver.launches)


def _dl_tensor(argument: torch.Tensor | np.ndarray, kept: list[Any]) -> _DLTensor:
    if isinstance(argument, torch.Tensor):
        shape = tuple(argument.shape)
        strides = argument.stride()
        address = argument.data_ptr()
        bits = 8 * argument.element_size()
        code = _torch_kind(argument.dtype)
    else:
        shape = argument.shape
        strides = tuple(stride // argument.itemsize for stride in argument.strides)
        address = argument.ctypes.data
        bits = 8 * argument.itemsize
        code = _KINDS[argument.dtype.kind]
    rank = len(shape)
    sizes = (ctypes.c_int64 * rank)(*shape)
    steps = (ctypes.c_int64 * rank)(*strides)
    tensor = _DLTensor(address, _CUDA, 0, rank, code, bits, 1, sizes, steps, 0)
    kept.extend((sizes, steps, tensor))
    return tensor


def _torch_kind(dtype: torch.dtype) -> int:
    if dtype is torch.bfloat16:
        return _BFLOAT
    if dtype.is_floating_point:
        return _KINDS["f"]
    return _KINDS["i" if dtype.is_signed else "u"]
