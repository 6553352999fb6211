"""A program: a recording with memory and loaded kernels, ready to be queued again and again."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.launch.boxes import Boxes
from dsv4.launch.buffers import byte_offset, storage_key
from dsv4.launch.items import Argument, Call, Launch, ShapeOf
from dsv4.launch.kernel import Shape
from dsv4.launch.loading import driver
from dsv4.launch.prepared import LaunchForm, PreparedLaunch, Value
from dsv4.launch.recording import Recording
from dsv4.launch.signature import Signature
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
        self._forms: dict[tuple[Signature, ShapeOf | None, bool], LaunchForm] = {}
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
            launch = item.in_dense if dense else item.in_sparse
            if launch is None:
                item.call(tokens)
                continue
            form = launch.form
            # One by one, so that the device works on those before meanwhile.
            if form.tokens != tokens or form.stream != stream:
                form.retarget(tokens, stream)
            if not form.launches:
                continue
            (error,) = launch_kernel(form.config, form.function, launch.parameters, 0)
            if error:
                raise RuntimeError(f"CUDA driver error: {error.name} at a launch of {item.name}")

    def _ready(self, item: Launch | Call, early: bool) -> "_ReadyCall | _ReadyLaunch":
        """``early``: a launch may start before what is queued in front of it has ended."""
        if isinstance(item, Call):
            return _ReadyCall(item, [self.tensor(tensor) for tensor in item.tensors])
        values = {name: self._value(value) for name, value in item.arguments.items()}
        sparse = self._prepared(item, item.shape, values, early)
        dense: PreparedLaunch | None = sparse
        if item.shape_of is None and item.differs_if_dense:
            shape = item.dense_shape
            dense = None if shape is None else self._prepared(item, shape, values, early)
        return _ReadyLaunch(item, sparse, dense)

    def _prepared(
        self, item: Launch, shape: Shape, values: Mapping[str, Value], early: bool
    ) -> PreparedLaunch:
        launch = PreparedLaunch(item.signature, self._form(item, shape, early))
        launch.take(values)
        return launch

    def _form(self, item: Launch, shape: Shape, early: bool) -> LaunchForm:
        """That of the launches that are alike, where the shape goes with the tokens."""
        key = (item.signature, item.shape_of, early)
        if key in self._forms:
            return self._forms[key]
        form = LaunchForm(item.signature, self.recording.target, shape, item.shape_of, early)
        if item.shape_of is not None:
            self._forms[key] = form
        return form

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


class _ReadyCall:
    """A function with its tensors, which is called and not launched."""

    in_sparse: PreparedLaunch | None = None
    in_dense: PreparedLaunch | None = None

    def __init__(self, item: Call, tensors: list[Tensor]) -> None:
        self.name = str(item.function)
        self._function = item.function
        self._tensors = tensors

    def call(self, tokens: int) -> None:
        """The function."""
        self._function(tokens, *self._tensors)


class _ReadyLaunch:
    """A launch with its memory. ``in_sparse``, ``in_dense``: what is launched in a step that is not
    dense, and in one that is; None: nothing is.
    """

    def __init__(self, item: Launch, sparse: PreparedLaunch, dense: PreparedLaunch | None) -> None:
        self.name = item.signature.kernel
        self.in_sparse = sparse
        self.in_dense = dense

    def call(self, tokens: int) -> None:
        """Nothing is done where nothing is launched."""
