"""Handing a tensor from one device to the next without the host: copies ordered by events."""

import logging

import torch
from torch import Tensor

_LOG = logging.getLogger("dsv4")


class HandOff:
    """Tensors from ``source`` to ``target``, one after another into the same memory, ``arrived``.

    The copy runs on the source's current stream and the target's current stream waits for it. The
    next copy waits until the target has read this one: up to where ``drain`` is called, else up to
    what is queued by then. Without peer access a copy goes through pinned host memory.
    """

    def __init__(self, source: torch.device, arrived: Tensor) -> None:
        """``arrived.shape[0]`` is the largest number of rows of one call."""
        self.source = source
        self.target = arrived.device
        self.arrived = arrived
        self._staged: Tensor | None = None
        if not torch.cuda.can_device_access_peer(source, self.target):
            _LOG.warning(
                "no peer access from %s to %s: copies go through host memory", source, self.target
            )
            self._staged = torch.empty(arrived.shape, dtype=arrived.dtype, pin_memory=True)
        # torch makes both current streams of a peer copy wait for each other. The target's own
        # stream must not hold the source back, hence a stream on which nothing but arrivals
        # happens.
        with torch.cuda.device(self.target):
            self._arrivals = torch.cuda.Stream(self.target)
            self._filled = torch.cuda.Event()
            self._drained = torch.cuda.Event()
        with torch.cuda.device(source):
            self._left = torch.cuda.Event()
        self._is_drained = True

    def send(self, tensor: Tensor) -> None:
        """Queues the copy of ``tensor`` to the first rows of ``arrived``."""
        if not self._is_drained:
            self.drain()
        self._is_drained = False
        self._arrivals.wait_event(self._drained)
        target = self.arrived[: tensor.shape[0]]
        if self._staged is not None:
            tensor = self._stage(tensor, self._staged)
        with torch.cuda.stream(self._arrivals):
            target.copy_(tensor, non_blocking=True)
        self._filled.record(self._arrivals)
        torch.cuda.current_stream(self.target).wait_event(self._filled)

    def drain(self) -> None:
        """What is queued on the target's current stream is the last that reads ``arrived``."""
        self._drained.record(torch.cuda.current_stream(self.target))
        self._is_drained = True

    def _stage(self, tensor: Tensor, memory: Tensor) -> Tensor:
        """The tensor in pinned memory; arrivals wait for it."""
        source_stream = torch.cuda.current_stream(self.source)
        staged = memory[: tensor.shape[0]]
        source_stream.wait_event(self._filled)
        with torch.cuda.device(self.source):
            staged.copy_(tensor, non_blocking=True)
            self._left.record(source_stream)
        self._arrivals.wait_event(self._left)
        return staged
