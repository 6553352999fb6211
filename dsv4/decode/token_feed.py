"""The token ids that captured steps read: static memory on every device, filled by the host or by the sampler."""

import torch

from dsv4.hand_off import HandOff

_TURNS = 4


class TokenFeed:
    """``inputs``: int64 ``[count]`` per device. The host's ids come through pinned memory; a token that the head's
    device has written into its own input is handed on to the others.
    """

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream], head: torch.device, count: int) -> None:
        """``streams`` are those on which steps run; ``head`` is the device that samples."""
        self.count = count
        self._streams, self._head = streams, head
        self._hand_offs = [
            HandOff(head, device, (count,), torch.int64, slots=1) for device in streams if device != head
        ]
        self.inputs = {hand_off.target: hand_off.slot(count) for hand_off in self._hand_offs}
        self.inputs[head] = torch.zeros(count, dtype=torch.int64, device=head)
        self._pinned = torch.zeros((_TURNS, count), dtype=torch.int64, pin_memory=True)
        self._copied = [{device: torch.cuda.Event() for device in streams} for _ in range(_TURNS)]
        self._puts = 0

    def put(self, ids: list[int]) -> None:
        """Queues copies of ``ids`` to every device. Pinned memory is written again only when it has been read."""
        turn = self._puts % _TURNS
        self._puts += 1
        for event in self._copied[turn].values():
            event.synchronize()
        pinned = self._pinned[turn]
        for index, token in enumerate(ids):
            pinned[index] = token
        for device, stream in self._streams.items():
            with torch.cuda.stream(stream):
                self.inputs[device].copy_(pinned, non_blocking=True)
                self._copied[turn][device].record(stream)

    def pass_on(self) -> None:
        """Queues the head's input to the other devices; on the steps' streams."""
        for hand_off in self._hand_offs:
            hand_off(self.inputs[self._head])
