"""A launch as the driver takes it, which changes with little work of the host."""

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv4.launch.items import ShapeOf
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


class LaunchForm:
    """How the driver launches a kernel for ``tokens`` tokens on ``stream``: its configuration, the
    kernel, and those arguments that are numbers of its shape. Launches that are alike share it, and
    it changes once for all of them.
    """

    def __init__(
        self,
        signature: Signature,
        target: Target,
        shape: Shape,
        shape_of: ShapeOf | None = None,
        early: bool = True,
    ) -> None:
        """``shape_of`` gives the shape for a number of tokens, with the names of numbers that
        ``shape`` has; None: nothing is launched. ``early``: a launch may overlap the end of the
        one before it.
        """
        self._target = target
        self._shape_of = shape_of
        self._shape: Shape | None = None
        self._most_shared = 0
        self._early = early
        parameters = [one for one in signature.parameters if one.name in shape.numbers]
        self.numbers = Words(parameters)
        self.config = driver().CUlaunchConfig()
        self.function: Any = None
        self.tokens = 0
        self.stream = 0
        self.launches = True
        self._take(shape)

    def retarget(self, tokens: int, stream: int) -> None:
        """For another number of tokens, or another stream."""
        # Of no number, should this be interrupted.
        self.tokens = 0
        shape = self._shape if self._shape_of is None else self._shape_of(tokens)
        self.launches = shape is not None
        if shape is not None and shape is not self._shape:
            self._take(shape)
        self.config.hStream = stream
        self.stream = stream
        self.tokens = tokens

    def _take(self, shape: Shape) -> None:
        before = self._shape
        self._shape = None
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
        self.numbers.pack(shape.numbers)
        self._shape = shape


class PreparedLaunch:
    """A launch as the driver takes it: its form, and pointers to the words of its arguments."""

    def __init__(self, signature: Signature, form: LaunchForm) -> None:
        self.form = form
        shared = form.numbers.addresses
        self._words = Words([one for one in signature.parameters if one.name not in shared])
        addresses = {**self._words.addresses, **shared}
        order = [addresses[parameter.name] for parameter in signature.parameters]
        self._pointers = (ctypes.c_void_p * len(order))(*order)
        self.parameters = ctypes.addressof(self._pointers)

    def take(self, values: Mapping[str, Value]) -> None:
        """Launches with these arguments from now on, beside the numbers of the shape."""
        self._words.pack(values)


class Words:
    """Arguments in memory of their own. ``addresses``: where each lies."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        formats = [_format(parameter) for parameter in parameters]
        *starts, nbytes = itertools.accumulate(map(struct.calcsize, formats), initial=0)
        self._names = [parameter.name for parameter in parameters]
        self._pack = _packer("".join(formats))
        self._words = (ctypes.c_uint64 * (nbytes // _WORD_BYTES))()
        first = ctypes.addressof(self._words)
        self.addresses = {
            name: first + start for name, start in zip(self._names, starts, strict=True)
        }

    def pack(self, values: Mapping[str, Value]) -> None:
        """Writes all of them."""
        self._pack(self._words, 0, *[values[name] for name in self._names])


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
