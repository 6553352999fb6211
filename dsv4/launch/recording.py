"""A recording: what one device is to do, in order, on buffers that have no memory yet.

Ops write to it: ``empty`` makes a buffer, ``launch`` notes a kernel with its arguments by name,
``call`` a function of torch. Buffers are tensors of torch's meta device, so views of them are made
as of any tensor and nothing has to be on a GPU: a recording on meta weights is also the memory plan
and the list of kernels to compile. ``dsv4.launch.program`` gives the buffers memory and runs what
was recorded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.kernel import Shape
from dsv4.launch.signature import Signature, signature
from dsv4.launch.target import Target
from dsv4.peers import Peers

ShapeOf = Callable[[int], Shape | None]


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments. ``shape_of`` gives its shape for a number of tokens; None: it is
    not launched.
    """

    signature: Signature
    shape: Shape
    arguments: Mapping[str, Tensor | int | float | None]
    shape_of: ShapeOf | None

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that the kernel reads or writes."""
        return [argument for argument in self.arguments.values() if isinstance(argument, Tensor)]


@dataclass(frozen=True)
class Call:
    """``function(tokens, *tensors)`` on the tensors' memory, queued on the current stream like a
    launch.
    """

    function: Callable[..., object]
    tensors: list[Tensor]


Item = Launch | Call


class Recording:
    """Items of steps of up to ``tokens`` tokens on ``target``. A prefill recording serves every
    number up to that.
    """

    def __init__(
        self,
        target: Target,
        tokens: int,
        nan_1: Tensor | None = None,
        peers: Peers | None = None,
        whole_seams: bool = False,
    ) -> None:
        """``nan_1``: int32 ``[1]`` of pinned memory, to which kernels that compare write 1 when
        they meet NaN, because a comparison hides it. None: nobody wants to know. ``peers``: the
        ranks with which this one shares the model; None: it is alone. ``whole_seams``: also of a
        prefill step every rank has the streams of all tokens.
        """
        self.target = target
        self.tokens = tokens
        self.nan_1 = nan_1
        self.peers = peers
        self.whole_seams = whole_seams
        self.exchanges = 0
        self.steps_begun = 0
        self.meetings: list[int] = []
        self.arrivals: list[int] = []
        self.items: list[Item] = []
        self.kept: list[Tensor] = []
        self.placed: dict[int, Tensor] = {}
        self._buffers: dict[int, Tensor] = {}
        self._zeroed: dict[str, Tensor] = {}
        self._has_sent = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous buffer whose address is a multiple of 512 bytes. It holds anything when an
        item writes it.
        """
        buffer = torch.empty(shape, dtype=dtype, device="meta")
        self._buffers[storage_key(buffer)] = buffer
        return buffer

    def empty_like(self, tensor: Tensor) -> Tensor:
        """``empty`` of the shape and dtype of ``tensor``."""
        return self.empty(tuple(tensor.shape), tensor.dtype)

    def zeroed(self, name: str, count: int) -> Tensor:
        """int32 ``[count]`` of this name, the same tensor for all of the recording: zeros before
        the first run.

        For kernels whose blocks count arrivals or hand words to each other: every launch leaves
        zeros where the next one counts on them. Launches of one recording follow each other, so
        that they can share it.
        """
        tensor = self._zeroed.setdefault(name, torch.empty(count, dtype=torch.int32, device="meta"))
        if tensor.shape[0] != count:
            raise ValueError(
                f"{name}: found {count} counters, expected {tensor.shape[0]} as asked for before"
            )
        return tensor

    def launch(self, shape: Shape | ShapeOf, **arguments: Tensor | int | float | None) -> None:
        """Notes a kernel. Arguments are those of its signature; those of ``shape.numbers`` are
        added.

        A function for ``shape`` is asked for every number of tokens from 1 to ``tokens``; it may
        return None where there is nothing to do.

        Raises ``TypeError`` for a missing, extra or mistyped argument, ``ValueError`` for a tensor
        elsewhere.
        """
        shape_of = None if isinstance(shape, Shape) else shape
        full = shape if isinstance(shape, Shape) else self._longest(shape)
        declared = signature(full.kernel.source, full.kernel.function)
        declared.check({**arguments, **full.numbers})
        launch = Launch(declared, full, arguments, shape_of)
        self._check_devices(declared.kernel, launch.tensors)
        self.items.append(launch)

    def call(self, function: Callable[..., object], *tensors: Tensor) -> None:
        """Notes ``function(tokens, *tensors)``, which queues work of torch; it gets the tensors
        whole.
        """
        self.items.append(Call(function, list(tensors)))

    def next_exchange(self) -> int:
        """The number of the next sum over the ranks: the same on all of them, because they record
        the same step.
        """
        self.exchanges += 1
        return self.exchanges - 1

    def begin_step(self) -> Tensor | None:
        """The counter of the steps in which ranks exchange words (``Peers.step_4``), which the next
        item moves on; None: there is no other rank.
        """
        if self.peers is None:
            return None
        self.steps_begun += 1
        return self.peers.step_4

    def send(self) -> None:
        """The next item pushes words to all ranks."""
        self._has_sent = True

    def receive(self) -> None:
        """The next item waits for words of all ranks: behind those that push them it is queued with
        the items of another part.
        """
        if self._has_sent:
            self.arrivals.append(len(self.items))
        self._has_sent = False

    def meet(self) -> None:
        """All ranks have come this far before any goes on."""
        self.meetings.append(len(self.items))

    def end_part(self) -> list[tuple[int, bool]]:
        """Where items that belong together are parted since this was last asked, in order, and
        whether the ranks meet there.
        """
        found = [(at, False) for at in self.arrivals] + [(at, True) for at in self.meetings]
        self.arrivals.clear()
        self.meetings.clear()
        self._has_sent = False
        return sorted(found)

    def place(self, buffer: Tensor, memory: Tensor) -> None:
        """Gives a buffer the first bytes of ``memory``, which is contiguous and of its dtype."""
        self.placed[storage_key(buffer)] = memory

    def keep(self, tensor: Tensor) -> Tensor:
        """Marks a buffer as read after the last item; returns it."""
        self.kept.append(tensor)
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        """Whether this is a buffer of ``empty`` or a view of one."""
        return tensor.is_meta and storage_key(tensor) in self._buffers

    @property
    def zeroed_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that ``zeroed`` made."""
        return tuple(self._zeroed.values())

    def _longest(self, shape_of: ShapeOf) -> Shape:
        """The shape for the most tokens that there is one for."""
        for tokens in range(self.tokens, 0, -1):
            shape = shape_of(tokens)
            if shape is not None:
                return shape
        raise ValueError(f"shape: found None for 1 to {self.tokens} tokens, expected a Shape")

    def _check_devices(self, kernel: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if (
                tensor.device != self.target.device
                and not tensor.is_meta
                and not tensor.is_pinned()
            ):
                raise ValueError(
                    f"{kernel}: found a tensor on {tensor.device}, expected {self.target.device}"
                )


def storage_key(tensor: Tensor) -> int:
    """Equal for the views of one buffer."""
    return tensor.untyped_storage()._cdata


def byte_offset(tensor: Tensor) -> int:
    """The bytes from the beginning of the buffer to the first element."""
    return int(tensor.storage_offset()) * tensor.itemsize


def is_aligned(tensor: Tensor, nbytes: int = 16) -> bool:
    """Whether the tensor begins at a multiple of ``nbytes`` (at most 512)."""
    return (byte_offset(tensor) if tensor.is_meta else tensor.data_ptr()) % nbytes == 0
