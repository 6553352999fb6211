"""A launch as the driver takes it, which changes with little work of the host."""

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Mapping
from typing import Any

from dsv4.launch.kernel import Shape
from dsv4.launch.loading import allow_shared_memory, driver, loaded
from dsv4.launch.signature import Parameter, Signature
from dsv4.launch.target import Target
from dsv4.launch.tensor_map import MAP_BYTES

# What an argument is for the driver: an address, a number, or the bytes of a tensor map.
Value = int | float | bytes

_WORD_BYTES = 8
# Above this the driver has to be asked: the 48 KiB that need no asking count the static shared
# memory as well.
_FREE_SHARED_BYTES = 16 << 10


class PreparedLaunch:
    """A launch as the driver takes it: its configuration, the kernel, and pointers to the words of
    its arguments. ``early``: it may overlap the end of the one before it.
    """

    def __init__(self, signature: Signature, target: Target, early: bool = True) -> None:
        parameters = signature.parameters
        self._target = target
        formats = [_format(parameter) for parameter in parameters]
        *starts, nbytes = itertools.accumulate(map(struct.calcsize, formats), initial=0)
        self._pack = _packer("".join(formats))
        self._places = {
            parameter.name: (start, _packer(format))
            for parameter, start, format in zip(parameters, starts, formats, strict=True)
        }
        self._words = (ctypes.c_uint64 * (nbytes // _WORD_BYTES))()
        first = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * len(starts))(*[first + start for start in starts])
        self._shape: Shape | None = None
        self._most_shared = 0
        self._early = early
        self.parameters = ctypes.addressof(self._pointers)
        self.config = driver().CUlaunchConfig()
        self.function: Any = None

    def take(self, shape: Shape, values: Mapping[str, Value]) -> None:
        """Launches in this shape with these arguments from now on."""
        self._configure(shape)
        numbers = {**values, **shape.numbers}
        self._pack(self._words, 0, *[numbers[name] for name in self._places])

    def change(self, shape: Shape) -> None:
        """Launches in this shape from now on, which has other numbers for the same arguments."""
        self._configure(shape)
        for name, number in shape.numbers.items():
            offset, pack = self._places[name]
            pack(self._words, offset, number)

    def _configure(self, shape: Shape) -> None:
        before = self._shape
        kernel = shape.kernel
        if before is None or (kernel is not before.kernel and kernel != before.kernel):
            self.function = loaded(kernel, self._target)
            self._most_shared = _FREE_SHARED_BYTES
        if shape.shared_bytes > self._most_shared:
            allow_shared_memory(kernel, self._target, shape.shared_bytes)
            self._most_shared = shape.shared_bytes
        config = self.config
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
        if before is None or shape.threads != before.threads:
            config.blockDimX = shape.threads
            config.blockDimY = 1
            config.blockDimZ = 1
        if before is None or shape.cluster != before.cluster:
            config.attrs = _attributes(shape.cluster, self._early)
            config.numAttrs = len(config.attrs)
        config.sharedMemBytes = shape.shared_bytes
        self._shape = shape


@functools.cache
def _packer(words: str) -> Callable[..., None]:
    return struct.Struct(words).pack_into


def _format(parameter: Parameter) -> str:
    """The format of ``struct`` for one argument, in words of eight bytes."""
    if parameter.names_boxes:
        return f"{MAP_BYTES}s"
    if parameter.pointer:
        return "Q"
    return {"float": "f4x", "int": "i4x", "unsigned": "I4x", "int64": "q"}[parameter.type]


@functools.cache
def _attributes(cluster: int, early: bool) -> list[Any]:
    """Launches may overlap the end of the one before them, so a kernel calls ``pdl_wait()`` before
    it touches anything that another one writes. Those behind a call may not: its kernels do not say
    when they can be overlapped, and what it writes is complete when the launch starts
    (``dsv4.launch.settled``).
    """
    bindings = driver()
    overlap = bindings.CUlaunchAttribute()
    overlap.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = int(early)
    if cluster == 1:
        return [overlap]
    clusters = bindings.CUlaunchAttribute()
    clusters.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    clusters.value.clusterDim.x = cluster
    clusters.value.clusterDim.y = 1
    clusters.value.clusterDim.z = 1
    return [overlap, clusters]
