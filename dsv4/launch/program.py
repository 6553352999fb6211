"""A program: a recording with memory and loaded kernels, ready to be queued again and again."""

from typing import Any

import torch
from torch import Tensor

from dsv4.launch.boxes import Boxes
from dsv4.launch.buffers import byte_offset, storage_key
from dsv4.launch.items import Argument, Call, Launch
from dsv4.launch.loading import driver
from dsv4.launch.prepared import PreparedLaunch, Value
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.launch.tensor_map import tensor_map
from dsv4.launch.workspace import lay_out


class Memory:
    """The bytes that the buffers of a device's recordings lie in. Recordings that share it run one
    after another.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)


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
        memory = self._memory_of(recorded).view(recorded.dtype)
        start = memory.storage_offset() + recorded.storage_offset()
        return memory.as_strided(recorded.size(), recorded.stride(), start)

    def run(
        self, tokens: int, start: int = 0, stop: int | None = None, dense: bool = False
    ) -> None:
        """Queues the items ``start`` to ``stop`` for this many tokens on the device's current
        stream. ``dense``: as in a dense step.

        The device must be the current one.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device.index or 0)
        launch_kernel = driver().cuLaunchKernelEx
        for item in self._items[start:stop]:
            # One by one, so that the device works on those before meanwhile.
            if item.tokens != tokens or item.stream != stream:
                item.retarget(tokens, stream)
            launch = item.in_dense if dense else item.in_sparse
            if launch is None:
                item.call(tokens)
                continue
            (error,) = launch_kernel(launch.config, launch.function, launch.parameters, 0)
            if error:
                raise RuntimeError(f"CUDA driver error: {error.name} at a launch of {item.name}")

    def _ready(self, item: Launch | Call, early: bool) -> Any:
        """``early``: a launch may start before what is queued in front of it has ended."""
        if isinstance(item, Call):
            return _ReadyCall(item, [self.tensor(tensor) for tensor in item.tensors])
        values = {name: self._value(value) for name, value in item.arguments.items()}
        target = self.recording.target
        if item.shape_of is None:
            return _ReadyLaunch(item, values, target, early)
        return _ReadyPrefillLaunch(item, values, target, early, self.recording.tokens)

    def _value(self, argument: Argument) -> Value:
        if argument is None:
            return 0
        if isinstance(argument, Boxes):
            return tensor_map(argument, self._address(argument.tensor))
        return self._address(argument) if isinstance(argument, Tensor) else argument

    def _address(self, tensor: Tensor) -> int:
        if not tensor.is_meta:
            return tensor.data_ptr()
        return self._memory_of(tensor).data_ptr() + byte_offset(tensor)

    def _memory_of(self, recorded: Tensor) -> Tensor:
        """Memory that begins where the buffer of a recorded tensor does."""
        key = storage_key(recorded)
        if key in self._zeroed:
            return self._zeroed[key]
        if key in self.recording.placed:
            return self.recording.placed[key]
        return self._memory.bytes[self._layout.offsets[key] :]


class _Ready:
    """An item for ``tokens`` on ``stream``. ``in_sparse``, ``in_dense``: what is launched in a step
    that is not dense, and in one that is; None: nothing is.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.stream = 0
        self.in_sparse: PreparedLaunch | None = None
        self.in_dense: PreparedLaunch | None = None

    def call(self, tokens: int) -> None:
        """What is done where nothing is launched."""

    def retarget(self, tokens: int, stream: int) -> None:
        """For another number of tokens, or another stream."""
        self.tokens = tokens
        self.stream = stream


class _ReadyCall(_Ready):
    """A function with its tensors."""

    def __init__(self, item: Call, tensors: list[Tensor]) -> None:
        super().__init__(str(item.function))
        self._function = item.function
        self._tensors = tensors

    def call(self, tokens: int) -> None:
        """The function."""
        self._function(tokens, *self._tensors)


class _ReadyLaunch(_Ready):
    """A launch with its memory."""

    def __init__(self, item: Launch, values: dict[str, Value], target: Target, early: bool) -> None:
        super().__init__(item.signature.kernel)
        # Kept alive: the launch itself has only their addresses.
        self._kept = [value for value in item.tensors if not value.is_meta]
        self.in_sparse = PreparedLaunch(item.signature, target, early)
        self.in_sparse.take(item.shape, values)
        self.in_dense = self.in_sparse
        if item.dense_shape is None:
            self.in_dense = None
        elif item.differs_if_dense:
            self.in_dense = PreparedLaunch(item.signature, target, early)
            self.in_dense.take(item.dense_shape, values)

    def retarget(self, tokens: int, stream: int) -> None:
        """For another stream."""
        super().retarget(tokens, stream)
        for prepared in (self.in_sparse, self.in_dense):
            if prepared is not None:
                prepared.config.hStream = stream


class _ReadyPrefillLaunch(_Ready):
    """A launch whose shape goes with the number of tokens: prepared once for the most of them, anew
    for other numbers.
    """

    def __init__(
        self,
        item: Launch,
        values: dict[str, Value],
        target: Target,
        early: bool,
        tokens: int,
    ) -> None:
        assert item.shape_of is not None
        super().__init__(item.signature.kernel)
        self._kept = [value for value in item.tensors if not value.is_meta]
        self._shape_of = item.shape_of
        self._most_tokens = tokens
        self._whole = PreparedLaunch(item.signature, target, early)
        self._other = PreparedLaunch(item.signature, target, early)
        for prepared in (self._whole, self._other):
            prepared.take(item.shape, values)
        self._launches_whole = item.shape_of(tokens) is not None

    def retarget(self, tokens: int, stream: int) -> None:
        """For another number of tokens, or another stream."""
        super().retarget(tokens, stream)
        prepared: PreparedLaunch | None = self._whole if self._launches_whole else None
        if tokens != self._most_tokens:
            shape = self._shape_of(tokens)
            prepared = None if shape is None else self._other
            if shape is not None:
                self._other.change(shape)
        if prepared is not None:
            prepared.config.hStream = stream
        self.in_sparse = prepared
        self.in_dense = prepared
