"""A barrier of streams: what is queued behind it waits for all that is queued in front of it."""

from collections.abc import Sequence

import torch


class StreamBarrier:
    """Of ``count`` streams; their devices go on working and the host does not wait."""

    def __init__(self, count: int) -> None:
        self._arrived = [torch.cuda.Event() for _ in range(count)]

    def cross(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """What these get from here on waits for what each of them has got before.

        The first one waits for all, and all for the first one: the host's work grows with the
        streams, where a wait of each for each grows with their square.
        """
        first, *others = streams
        arrived_first, *arrived_others = self._arrived
        for stream, arrived in zip(streams, self._arrived, strict=True):
            arrived.record(stream)
        for arrived in arrived_others:
            first.wait_event(arrived)
        if len(others) > 1:
            arrived_first.record(first)
        for stream in others:
            stream.wait_event(arrived_first)
