"""Handing a tensor from one device to the next without the host: copies ordered by events, several in flight."""

import logging

import torch
from torch import Tensor

_LOG = logging.getLogger("dsv4")


class HandOff:
    """Tensors from ``source`` to ``target``, into ``slots`` buffers that take turns.

    The copy runs on the source's current stream and the target's current stream waits for it, so either device can be
    ahead of the other by as many calls as there are slots. Without peer access a copy goes through pinned host memory.
    """

    def __init__(
        self, source: torch.device, target: torch.device, shape: tuple[int, ...], dtype: torch.dtype, slots: int
    ) -> None:
        """``shape[0]`` is the largest number of rows of one call."""
        self.source, self.target = source, target
        self._slots = [torch.empty(shape, dtype=dtype, device=target) for _ in range(slots)]
        self._staged = None
        if not torch.cuda.can_device_access_peer(source, target):
            _LOG.warning("no peer access from %s to %s: copies go through host memory", source, target)
            self._staged = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(slots)]
        # torch makes both current streams of a peer copy wait for each other. The target's own stream must not hold the
        # source back, hence a stream on which nothing but arrivals happens.
        with torch.cuda.device(target):
            self._arrivals = torch.cuda.Stream(target)
            self._filled = [torch.cuda.Event() for _ in range(slots)]
            self._drained = [torch.cuda.Event() for _ in range(slots)]
        with torch.cuda.device(source):
            self._left = [torch.cuda.Event() for _ in range(slots)]
        self._calls = 0

    def slot(self, rows: int) -> Tensor:
        """The first buffer's ``rows``: where every call arrives if there is one slot."""
        return self._slots[0][:rows]

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor's copy on the target; valid until this has been called as often again as there are slots."""
        target_stream = torch.cuda.current_stream(self.target)
        index = self._calls % len(self._slots)
        # What reads the slot of the call before this one has been queued by now.
        self._drained[(self._calls - 1) % len(self._slots)].record(target_stream)
        self._calls += 1
        self._arrivals.wait_event(self._drained[index])
        slot = self._slots[index][: tensor.shape[0]]
        if self._staged is not None:
            tensor = self._stage(tensor, index)
        with torch.cuda.stream(self._arrivals):
            slot.copy_(tensor, non_blocking=True)
        self._filled[index].record(self._arrivals)
        target_stream.wait_event(self._filled[index])
        return slot

    def _stage(self, tensor: Tensor, index: int) -> Tensor:
        """The tensor in pinned memory; arrivals wait for it."""
        assert self._staged is not None
        source_stream = torch.cuda.current_stream(self.source)
        staged = self._staged[index][: tensor.shape[0]]
        source_stream.wait_event(self._filled[index])
        with torch.cuda.device(self.source):
            staged.copy_(tensor, non_blocking=True)
            self._left[index].record(source_stream)
        self._arrivals.wait_event(self._left[index])
        return staged
