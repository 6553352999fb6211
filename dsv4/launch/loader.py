"""Compiles CUDA C++ with NVRTC at first use, keeps the cubins on disk, and launches kernels on torch's streams.

The cache key covers everything that decides the machine code: the source, every header of ``dsv4/ops``, this file with
its options, the defines and the compiler's version. Entries are written to a temporary name and renamed, so that
processes can share the folder; an entry that cannot be loaded counts as absent. ``DSV4_KERNEL_CACHE`` names the folder
(default ``~/.cache/dsv4/kernels``).
"""

# cuda.core is compiled and ships no stubs.
# pyright: reportAttributeAccessIssue=false

import ctypes
import functools
import hashlib
import importlib.metadata
import io
import os
import struct
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from cuda.bindings import driver
from cuda.core import Device, Kernel, ObjectCode, Program, ProgramOptions
from torch import Tensor

OPS = Path(__file__).parent.parent / "ops"
SOURCES = {path.stem: path for path in OPS.glob("*/*.cu")}
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
_COMPILER_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")

Defines = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Compiled:
    """Machine code of one ``.cu`` file. ``log`` is the assembler's resource report: registers, stack, spills."""

    cubin: bytes
    log: str


def compile_source(source: str, architecture: str, defines: Defines = ()) -> Compiled:
    """Compiles ``<source>.cu`` of an operation's folder for ``architecture``; needs no GPU.

    A source that does not compile raises cuda.core's error, which holds the compiler's messages.
    """
    path = SOURCES[source]
    options = ProgramOptions(
        name=path.name,
        std="c++17",
        arch=architecture,
        include_path=[str(path.parent), str(OPS / "_device"), *_cuda_headers()],
        define_macro=[(name, str(value)) for name, value in defines] or None,
        ptxas_options=["-v"],
        # Some versions take a generic lambda inside a kernel for host code otherwise.
        device_as_default_execution_space=True,
    )
    log = io.StringIO()
    code = Program(path.read_text(encoding="utf-8"), "c++", options).compile("cubin", logs=log)
    return Compiled(bytes(code.code), log.getvalue())


Argument = Tensor | int | float | None
# A tensor, or ``Tensor`` itself where a prepared launch gets it later.
Given = TypeVar("Given", Tensor, type[Tensor])
_NUMBERS = (int, float)


class Launch:
    """A kernel with its configuration and arguments, of which some are left open: called with those, in their order, it
    queues the kernel on the current stream.
    """

    def __init__(
        self, kernel: Kernel, config: driver.CUlaunchConfig, device_index: int, arguments: Sequence[Argument | type]
    ) -> None:
        """An argument that is a type is open."""
        kinds = [argument for argument in arguments if isinstance(argument, type)]
        fixed = [argument for argument in arguments if not isinstance(argument, type)]
        # A word for each argument, the open ones first; the driver is given pointers to them in the kernel's order.
        self._words = (ctypes.c_uint64 * len(arguments))()
        addresses = range(ctypes.addressof(self._words), ctypes.addressof(self._words) + ctypes.sizeof(self._words), 8)
        of_open, of_fixed = iter(addresses[: len(kinds)]), iter(addresses[len(kinds) :])
        order = [next(of_open if isinstance(argument, type) else of_fixed) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(arguments))(*order)
        _layout(map(type, fixed)).pack_into(self._words, 8 * len(kinds), *map(_value, fixed))
        self._pack_open, self._lock, self._kept = _layout(kinds).pack_into, threading.Lock(), fixed
        self._config, self._device_index = config, device_index
        self._function, self._parameters = driver.CUfunction(int(kernel.handle)), ctypes.addressof(self._pointers)

    def __call__(self, *arguments: Tensor | int | float) -> None:
        values = [argument if isinstance(argument, _NUMBERS) else argument.data_ptr() for argument in arguments]
        # The driver has copied the words when it returns; until then no other thread may write its own.
        with self._lock:
            self._pack_open(self._words, 0, *values)
            self._config.hStream = torch._C._cuda_getCurrentRawStream(self._device_index)
            (error,) = driver.cuLaunchKernelEx(self._config, self._function, self._parameters, 0)
        if error:
            raise RuntimeError(f"CUDA driver error: {error.name} at a launch")


def launch(
    source: str,
    function: str,
    grid: int | tuple[int, ...],
    block: int,
    *arguments: Argument,
    device: torch.device,
    shared_bytes: int = 0,
    cluster: int | None = None,
    defines: Defines = (),
) -> None:
    """Launches ``extern "C" __global__ function`` of ``<source>.cu`` on the current stream of ``device``.

    Arguments become pointers (tensors and None), ``int`` (integers) and ``float`` (floats). Every launch may overlap
    the end of the kernel before it, so a kernel must call ``pdl_wait()`` before it touches anything that another
    kernel writes. ``cluster`` is the number of blocks per cluster along x and must divide ``grid``'s x.
    """
    kinds = tuple(map(type, arguments))
    all_open = _all_open(source, function, grid, block, kinds, device, shared_bytes, cluster, defines)
    all_open(*[argument for argument in arguments if argument is not None])


def prepare(
    source: str,
    function: str,
    grid: int | tuple[int, ...],
    block: int,
    *arguments: Argument | type,
    device: torch.device,
    shared_bytes: int = 0,
    cluster: int | None = None,
    defines: Defines = (),
) -> Launch:
    """``launch`` for later, several times faster at each call: what is the same every time is given here, and of the
    other arguments only the type, ``Tensor``, ``int`` or ``float``.
    """
    index = device.index or 0
    kernel, expected = _kernel(source, function, index, shared_bytes, defines)
    # The driver reads as many arguments as the kernel declares, whatever it was given.
    if len(arguments) != expected:
        raise TypeError(f"{source}.cu {function}: found {len(arguments)} arguments, expected {expected}")
    return Launch(kernel, _launch_config(grid, block, shared_bytes, cluster), index, arguments)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def zeroed_counters(device: torch.device, owner: str, count: int) -> Tensor:
    """int32 zeros ``[count]`` that belong to ``owner`` for the life of the process.

    For kernels whose blocks count arrivals: the last block must set its counter back to 0, so that every launch finds
    zeros. Launches of one owner on one device must not run at the same time.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)


def cache_folder() -> Path:
    """Where cubins are kept between processes."""
    return Path(os.environ.get("DSV4_KERNEL_CACHE") or Path.home() / ".cache" / "dsv4" / "kernels")


@functools.lru_cache(maxsize=4096)
def _all_open(
    source: str,
    function: str,
    grid: int | tuple[int, ...],
    block: int,
    kinds: tuple[type, ...],
    device: torch.device,
    shared_bytes: int,
    cluster: int | None,
    defines: Defines,
) -> Launch:
    """The launch of arguments of these types, all open but for those that are None."""
    arguments = [None if kind is type(None) else kind for kind in kinds]
    named = {"device": device, "shared_bytes": shared_bytes, "cluster": cluster, "defines": defines}
    return prepare(source, function, grid, block, *arguments, **named)


def _layout(kinds: Iterable[type]) -> struct.Struct:
    """One word for each argument of these types. An ``int`` of a kernel is the low half of its word."""
    return struct.Struct("".join("f4x" if issubclass(kind, float) else "q" for kind in kinds))


def _value(argument: Argument) -> int | float:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument or 0


def _launch_config(
    grid: int | tuple[int, ...], block: int, shared_bytes: int, cluster: int | None
) -> driver.CUlaunchConfig:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs = _attributes(cluster)
    config.numAttrs = len(config.attrs)
    return config


@functools.cache
def _attributes(cluster: int | None) -> list[driver.CUlaunchAttribute]:
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    if cluster is None:
        return [overlap]
    clusters = driver.CUlaunchAttribute()
    clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    clusters.value.clusterDim.x, clusters.value.clusterDim.y, clusters.value.clusterDim.z = cluster, 1, 1
    return [overlap, clusters]


@functools.cache
def _kernel(source: str, function: str, device_index: int, shared_bytes: int, defines: Defines) -> tuple[Kernel, int]:
    """The kernel on this device, and how many arguments it takes."""
    device = Device(device_index)
    device.set_current()
    kernel = _module(source, architecture_of(device_index), defines).get_kernel(function)
    # The limit of 48 KiB without asking counts the static shared memory as well.
    if shared_bytes > 16 << 10:
        _allow_shared_memory(kernel, shared_bytes, device_index)
    return kernel, kernel.num_arguments


def architecture_of(device_index: int) -> str:
    """The compile target of a GPU; raises ``RuntimeError`` for one that has none."""
    major, minor = torch.cuda.get_device_capability(device_index)
    architecture = compile_target(major, minor)
    if architecture is None:
        raise RuntimeError(f"device: found compute capability {major}.{minor}, expected one of {ARCHITECTURES}")
    return architecture


def compile_target(major: int, minor: int) -> str | None:
    """The architecture of ``ARCHITECTURES`` for a compute capability, if there is one."""
    architecture = f"sm_{major}{minor}a"
    return architecture if architecture in ARCHITECTURES else None


@functools.cache
def _module(source: str, architecture: str, defines: Defines) -> ObjectCode:
    path = cache_folder() / f"{source}-{_key(source, architecture, defines)}.cubin"
    try:
        stored = path.read_bytes()
        digest, cubin = stored[:32], stored[32:]
        if hashlib.sha256(cubin).digest() == digest:
            return ObjectCode.from_cubin(cubin)
    except OSError:
        pass
    cubin = compile_source(source, architecture, defines).cubin
    _store(path, hashlib.sha256(cubin).digest() + cubin)
    return ObjectCode.from_cubin(cubin)


def _store(path: Path, content: bytes) -> None:
    """Writes whole or not at all; a folder that cannot be written only costs the next process its time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError:
        return


def _key(source: str, architecture: str, defines: Defines) -> str:
    digest = hashlib.sha256(repr((source, architecture, defines, _compiler_version())).encode())
    for path in (Path(__file__), SOURCES[source], *sorted(OPS.glob("*/*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


@functools.cache
def _compiler_version() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("cuda-core", *_COMPILER_PACKAGES[:2]))


@functools.cache
def _cuda_headers() -> tuple[str, ...]:
    """Include folders of the pip-installed CUDA headers, or of a toolkit named by ``CUDA_HOME``."""
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"
    for folder in (wheel, toolkit):
        if (folder / "cuda_fp16.h").is_file():
            return str(folder), str(folder / "cccl")
    raise RuntimeError(f"CUDA headers: found none in {wheel} or {toolkit}, expected those of nvidia-cuda-runtime")


def _allow_shared_memory(kernel: Kernel, shared_bytes: int, device_index: int) -> None:
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.CUdevice(device_index)
    # One kernel is launched with several sizes: the limit may only grow, or an earlier, larger launch would fail later.
    error, allowed = driver.cuKernelGetAttribute(attribute, kernel.handle, device)
    if error == driver.CUresult.CUDA_SUCCESS and allowed >= shared_bytes:
        return
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"shared memory: found {shared_bytes} bytes per block, more than there are ({error.name})")
