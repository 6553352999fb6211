"""A program: a recording with memory and loaded kernels, ready to be queued again and again."""

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4.launch.buffers import byte_offset, storage_key
from dsv4.launch.items import Call, Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.loading import allow_shared_memory, driver, loaded
from dsv4.launch.recording import Recording
from dsv4.launch.signature import Parameter, Signature
from dsv4.launch.target import Target
from dsv4.launch.workspace import ALIGNMENT, lay_out

_WORD_BYTES = 8
# Above this the driver has to be asked: the 48 KiB that need no asking count the static shared
# memory as well.
_FREE_SHARED_BYTES = 16 << 10


class Memory:
    """The bytes that the buffers of a device's recordings lie in. Recordings that share it run one
    after another.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.bytes = torch.empty(max(nbytes, ALIGNMENT), dtype=torch.uint8, device=device)


class Program:
    """The items of a recording in their order, to be run whole or by ranges."""

    def __init__(
        self, recording: Recording, memory: Memory | None = None, early: bool = False
    ) -> None:
        """Without ``memory``, or with too little, the program has its own. ``early``: the first
        item may start before what is queued in front of the program has ended, so what it reads
        must be complete long before; else all that an earlier run has written is.
        """
        self.recording = recording
        self.device = recording.target.device
        self._layout = lay_out(recording)
        if memory is None or memory.bytes.nbytes < self._layout.nbytes:
            memory = Memory(self.device, self._layout.nbytes)
        self._memory = memory
        self._zeroed = {
            storage_key(tensor): torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
            for tensor in recording.zeroed_tensors
        }
        self._tokens = recording.tokens
        self._stream = 0
        self._items = []
        for item in recording.items:
            self._items.append(self._ready(item, early))
            early = not isinstance(item, Call) and (early or item.dense_shape is not None)

    def tensor(self, recorded: Tensor) -> Tensor:
        """The memory of a recorded tensor: a buffer's, or the tensor itself where it had memory
        already.
        """
        if not recorded.is_meta:
            return recorded
        key = storage_key(recorded)
        if key in self._zeroed:
            return self._zeroed[key]
        if key in self.recording.placed:
            memory = self.recording.placed[key]
            return memory.as_strided(
                recorded.size(),
                recorded.stride(),
                memory.storage_offset() + recorded.storage_offset(),
            )
        start = self._layout.offsets[key]
        storage = self._memory.bytes[start:].view(recorded.dtype)
        return storage.as_strided(
            recorded.size(), recorded.stride(), storage.storage_offset() + recorded.storage_offset()
        )

    def run(
        self, tokens: int, start: int = 0, stop: int | None = None, dense: bool = False
    ) -> None:
        """Queues the items ``start`` to ``stop`` for this many tokens on the device's current
        stream. ``dense``: as in a dense step.

        The device must be the current one.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device.index or 0)
        if stream != self._stream or tokens != self._tokens:
            self._retarget(tokens, stream)
        launch_kernel = driver().cuLaunchKernelEx
        for item in self._items[start:stop]:
            launch = item.in_dense if dense else item.in_sparse
            if launch is None:
                item.call(tokens)
                continue
            (error,) = launch_kernel(launch.config, launch.function, launch.parameters, 0)
            if error:
                raise RuntimeError(f"CUDA driver error: {error.name} at a launch of {item.name}")

    def _retarget(self, tokens: int, stream: int) -> None:
        for item in self._items:
            item.retarget(tokens, stream)
        self._tokens = tokens
        self._stream = stream

    def _ready(self, item: Launch | Call, early: bool) -> Any:
        """``early``: a launch may start before what is queued in front of it has ended."""
        if isinstance(item, Call):
            return _ReadyCall(item, [self.tensor(tensor) for tensor in item.tensors])
        values = {
            name: self._address(value) if value is None or isinstance(value, Tensor) else value
            for name, value in item.arguments.items()
        }
        target = self.recording.target
        if item.shape_of is None:
            return _ReadyLaunch(item, values, target, early)
        return _ReadyPrefillLaunch(item, values, target, early, self._tokens)

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        if not tensor.is_meta:
            return tensor.data_ptr()
        key = storage_key(tensor)
        if key in self._zeroed:
            return self._zeroed[key].data_ptr() + byte_offset(tensor)
        if key in self.recording.placed:
            return self.recording.placed[key].data_ptr() + byte_offset(tensor)
        return self._memory.bytes.data_ptr() + self._layout.offsets[key] + byte_offset(tensor)


class _ReadyCall:
    """A function with its tensors."""

    in_sparse = None
    in_dense = None

    def __init__(self, item: Call, tensors: list[Tensor]) -> None:
        self._function = item.function
        self._tensors = tensors

    def call(self, tokens: int) -> None:
        self._function(tokens, *self._tensors)

    def retarget(self, tokens: int, stream: int) -> None:
        """A call has nothing that depends on them."""


class PreparedLaunch:
    """A launch as the driver takes it: its configuration, the kernel, and pointers to the words of
    its arguments. ``early``: it may overlap the end of the one before it.
    """

    def __init__(self, signature: Signature, target: Target, early: bool = True) -> None:
        parameters = signature.parameters
        self._target = target
        self._pack = struct.Struct("".join(map(_word, parameters))).pack_into
        self._names = [parameter.name for parameter in parameters]
        self._words = (ctypes.c_uint64 * len(parameters))()
        start = ctypes.addressof(self._words)
        addresses = range(start, start + _WORD_BYTES * len(parameters), _WORD_BYTES)
        self._pointers = (ctypes.c_void_p * len(parameters))(*addresses)
        self._shape: Shape | None = None
        self._early = early
        self.parameters = ctypes.addressof(self._pointers)
        self.config = driver().CUlaunchConfig()
        self.function: Any = None

    def take(self, shape: Shape, values: Mapping[str, int | float]) -> None:
        """Launches in this shape from now on."""
        before = self._shape
        if before is None or shape.kernel != before.kernel:
            self.function = loaded(shape.kernel, self._target)
        if shape.shared_bytes > _FREE_SHARED_BYTES:
            allow_shared_memory(shape.kernel, self._target, shape.shared_bytes)
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
        numbers = {**values, **shape.numbers}
        self._pack(self._words, 0, *[numbers[name] for name in self._names])


class _ReadyLaunch:
    """A launch with its memory. ``in_sparse``, ``in_dense``: what is queued in a step that is not
    dense, and in one that is; None: nothing.
    """

    def __init__(
        self, item: Launch, values: dict[str, int | float], target: Target, early: bool
    ) -> None:
        self.name = item.signature.kernel
        # The launch has the addresses of these alone.
        self._kept = [value for value in item.tensors if not value.is_meta]
        self.in_sparse = PreparedLaunch(item.signature, target, early)
        self.in_sparse.take(item.shape, values)
        self.in_dense: PreparedLaunch | None = self.in_sparse
        if item.dense_shape is None:
            self.in_dense = None
        elif item.differs_if_dense:
            self.in_dense = PreparedLaunch(item.signature, target, early)
            self.in_dense.take(item.dense_shape, values)

    def call(self, tokens: int) -> None:
        """Where nothing is queued there is nothing to launch."""

    def retarget(self, tokens: int, stream: int) -> None:
        """For another stream."""
        for prepared in (self.in_sparse, self.in_dense):
            if prepared is not None:
                prepared.config.hStream = stream


class _ReadyPrefillLaunch:
    """A launch whose shape goes with the number of tokens: prepared once for the most of them, anew
    for other numbers.
    """

    def __init__(
        self,
        item: Launch,
        values: dict[str, int | float],
        target: Target,
        early: bool,
        tokens: int,
    ) -> None:
        assert item.shape_of is not None
        self.name = item.signature.kernel
        self._kept = [value for value in item.tensors if not value.is_meta]
        self._shape_of = item.shape_of
        self._values = values
        self._most_tokens = tokens
        self._whole = PreparedLaunch(item.signature, target, early)
        self._whole.take(item.shape, values)
        self._other = PreparedLaunch(item.signature, target, early)
        self._launches_whole = item.shape_of(tokens) is not None
        self.retarget(tokens, 0)

    def call(self, tokens: int) -> None:
        """As of ``_ReadyLaunch``."""

    def retarget(self, tokens: int, stream: int) -> None:
        """For another number of tokens, or another stream."""
        prepared: PreparedLaunch | None = self._whole if self._launches_whole else None
        if tokens != self._most_tokens:
            shape = self._shape_of(tokens)
            prepared = None if shape is None else self._other
            if shape is not None:
                self._other.take(shape, self._values)
        if prepared is not None:
            prepared.config.hStream = stream
        self.in_sparse = prepared
        self.in_dense = prepared


def _word(parameter: Parameter) -> str:
    """The format of ``struct`` for one argument in eight bytes."""
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
