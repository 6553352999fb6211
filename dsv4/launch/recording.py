"""A recording: what one device is to do, in order, on buffers that have no memory yet.

Ops write to it: ``empty`` makes a buffer, ``launch`` notes a kernel with its arguments by name,
``call`` a function of torch. Buffers are tensors of torch's meta device, so views of them are made
as of any tensor and nothing has to be on a GPU: a recording on meta weights is also the memory plan
and the list of kernels to compile. ``dsv4.launch.program`` gives the buffers memory and runs what
was recorded.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Argument, Call, Item, Launch, ShapeOf
from dsv4.launch.kernel import Shape
from dsv4.launch.left_work import Left, LeftWork
from dsv4.launch.settled import is_settled
from dsv4.launch.shapes import ShapesByTokens, longest_of
from dsv4.launch.signature import signature
from dsv4.launch.target import Target
from dsv4.peers import Peers


class _Serving(NamedTuple):
    """An item that serves the indexer's choice, its place, and its shape where nobody chooses."""

    at: int
    item: Item
    dense_shape: Shape | None


class Recording:
    """Items of steps of up to ``tokens`` tokens on ``target``. A prefill recording serves every
    number up to that.

    ``dense_until``: a step is dense if the sequence has at most so many tokens behind it. There the
    indexer would choose every entry, so what serves its choice is left out.
    """

    def __init__(
        self,
        target: Target,
        tokens: int,
        nan_1: Tensor | None = None,
        peers: Peers | None = None,
        traced: bool = False,
    ) -> None:
        """``nan_1``: int32 ``[1]`` of pinned memory, to which kernels that compare write 1 when
        they meet NaN, because a comparison hides it. None: nobody wants to know. ``peers``: the
        ranks with which this one shares the model; None: it is alone. ``traced``: somebody
        wants every value, and that of all tokens on every rank.
        """
        self.target = target
        self.tokens = tokens
        self.nan_1 = nan_1
        self.peers = peers
        self.traced = traced
        self.dense_until = 0
        self.exchanges = 0
        self.steps_begun = 0
        self.meetings: list[int] = []
        self.arrivals: list[int] = []
        self.items: list[Item] = []
        self.kept: list[Tensor] = []
        self.placed: dict[int, Tensor] = {}
        self._reached: set[int] = set()
        self._buffers: dict[int, Tensor] = {}
        self._zeroed: dict[str, Tensor] = {}
        self._has_sent = False
        # Storages that are complete when the next item starts, as far as somebody asked.
        self._settled: set[int] = set()
        self._serving: list[_Serving] = []
        self._choices: dict[int, tuple[int, list[_Serving]]] = {}
        # By the storages of its results, the latest last.
        self._left: dict[int, Left] = {}

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

    def launch(
        self,
        shape: Shape | ShapeOf,
        dense_shape: Shape | None = None,
        /,
        **arguments: Argument,
    ) -> None:
        """Notes a kernel. Arguments are those of its signature; those of ``shape.numbers`` are
        added. ``dense_shape``: in dense steps, if it differs.

        A function for ``shape`` is asked for every number of tokens from 1 to ``tokens``; it may
        return None where there is nothing to do.

        Raises ``TypeError`` for a missing, extra or mistyped argument, ``ValueError`` for a tensor
        elsewhere, and for one that the kernel reads early and that is not settled.
        """
        shape_of = None if isinstance(shape, Shape) else shape
        full = shape if isinstance(shape, Shape) else self._longest(shape)
        declared = signature(full.kernel.source, full.kernel.function)
        declared.check({**arguments, **full.numbers})
        launch = Launch(declared, full, arguments, shape_of, dense_shape or full)
        self._do_left(launch.tensors, launch.written_storages)
        self._check_devices(declared.kernel, launch.tensors)
        if not self.is_settled(*launch.read_early):
            raise ValueError(
                f"{declared.kernel}: found an argument that the kernels in front may be writing, "
                "expected one that is complete when it starts"
            )
        self.items.append(launch)
        self._settled -= launch.written_storages

    def call(self, function: Callable[..., object], *tensors: Tensor) -> None:
        """Notes ``function(tokens, *tensors)``, which queues work of torch; it gets the tensors
        whole.
        """
        self._do_left(tensors)
        self.items.append(Call(function, list(tensors)))

    def leave(self, work: LeftWork) -> None:
        """The last item leaves this to a later one."""
        left = Left(work, self.items[-1], len(self.items))
        self._left |= {storage_key(result): left for result in work.results}

    def left(self) -> LeftWork | None:
        """What was left last, for the next item to take along; None: it is done, or nothing was."""
        left = next(reversed(self._left.values()), None)
        return left.work if left is not None and left.is_undone(self.items) else None

    def is_settled(self, *tensors: Tensor) -> bool:
        """Whether these are complete when the next item starts, so that it may read them in front
        of its wait. What was left of them is done first.
        """
        self._do_left(tensors)
        unknown = {storage_key(tensor) for tensor in tensors} - self._settled
        if not is_settled(self.items, unknown):
            return False
        self._settled |= unknown
        return True

    def restore(self, items: Sequence[Item]) -> None:
        """These are all items, as they were before."""
        self.items[:] = items
        self._settled.clear()

    def serve_choice(self, dense_shape: Shape | None) -> None:
        """The last launch serves the indexer's choice, but for what ``dense_shape`` does; None: it
        does nothing else.
        """
        self._serving.append(_Serving(len(self.items) - 1, self.items[-1], dense_shape))

    def choose(self, selected_TK: Tensor, all_until: int) -> None:
        """``selected_TK`` is the choice that was served: of sequences of up to ``all_until`` tokens
        it holds every entry.
        """
        self._choices[storage_key(selected_TK)] = (all_until, self._serving)
        self._serving = []

    def leave_choice_out(self, selected_TK: Tensor) -> bool:
        """Leaves what serves this choice out of dense steps, where the next item does without it.
        False: it has to stay, because it is traced or another op took a launch's place.
        """
        all_until, serving = self._choices.pop(storage_key(selected_TK), (0, []))
        are_there = all(self.items[served.at] is served.item for served in serving)
        if self.traced or not (all_until and are_there):
            return False
        for at, item, dense_shape in serving:
            assert isinstance(item, Launch), "calls have no shape"
            self.items[at] = replace(item, dense_shape=dense_shape)
        self._settled.clear()
        self.dense_until = min(self.dense_until or all_until, all_until)
        return True

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

    def reach(self, memory: Tensor) -> None:
        """Allows launches to read and write this memory, also where it is another device's."""
        self._reached.add(storage_key(memory))

    def keep(self, tensor: Tensor) -> Tensor:
        """Marks a buffer as read after the last item; returns it."""
        self._do_left((tensor,))
        self.kept.append(tensor)
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        """Whether this is a buffer of ``empty`` or a view of one."""
        return storage_key(tensor) in self._buffers

    @property
    def zeroed_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that ``zeroed`` made."""
        return tuple(self._zeroed.values())

    def _do_left(self, tensors: Sequence[Tensor], written: Collection[int] = ()) -> None:
        """Whatever was left of ``tensors`` is done, but for those that the next item writes."""
        if not self._left:
            return
        for key in {storage_key(tensor) for tensor in tensors} & self._left.keys():
            left = self._left[key]
            if key not in written and left.is_undone(self.items):
                self.launch(left.work.shape, **left.work.arguments)

    def _longest(self, shape_of: ShapeOf) -> Shape:
        """The shape for the most tokens that there is one for."""
        if isinstance(shape_of, ShapesByTokens):
            shape = shape_of.longest(self.tokens)
        else:
            shape = longest_of(shape_of, self.tokens)
        if shape is not None:
            return shape
        raise ValueError(f"shape: found None for 1 to {self.tokens} tokens, expected a Shape")

    def _check_devices(self, kernel: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if (
                tensor.device != self.target.device
                and not tensor.is_meta
                and not tensor.is_pinned()
                and storage_key(tensor) not in self._reached
            ):
                raise ValueError(
                    f"{kernel}: found a tensor on {tensor.device}, expected {self.target.device}"
                )
