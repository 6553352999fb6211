"""The token ids that steps read: static memory on every device, filled by the host or by the
sampler.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsv4.parallel.hand_off import HandOff

_TURNS = 4


class TokenFeed:
    """``inputs``: int64 ``[T]`` per device. The host's ids come through pinned memory; a token that
    the head's device has written into its own input is handed on to the others.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        head: torch.device,
        tokens: int,
        memory: Mapping[torch.device, Tensor] | None = None,
    ) -> None:
        """``head`` is the device that samples. ``memory``: whose first places are the inputs."""
        self._head = head
        if memory is None:
            memory = {
                device: torch.zeros(tokens, dtype=torch.int64, device=device) for device in devices
            }
        self.inputs = {device: memory[device][:tokens] for device in devices}
        others = [device for device in devices if device != head]
        self._hand_offs = [HandOff(head, self.inputs[device]) for device in others]
        self._pinned = torch.zeros((_TURNS, tokens), dtype=torch.int64, pin_memory=True)
        self._copied = [{device: torch.cuda.Event() for device in devices} for _ in range(_TURNS)]
        self._puts = 0

    def put(self, token_ids: Sequence[int]) -> None:
        """Queues copies of the ids to the first places of every device's input, on the devices'
        current streams.

        Pinned memory is written again only when it has been read.
        """
        turn = self._puts % _TURNS
        self._puts += 1
        for event in self._copied[turn].values():
            event.synchronize()
        pinned: Tensor = self._pinned[turn, : len(token_ids)]
        pinned.copy_(torch.tensor(token_ids, dtype=torch.int64))
        for device, tokens_T in self.inputs.items():
            tokens_T[: len(token_ids)].copy_(pinned, non_blocking=True)
            self._copied[turn][device].record(torch.cuda.current_stream(device))

    def pass_on(self) -> None:
        """Queues the head's input to the other devices, on the current streams."""
        for hand_off in self._hand_offs:
            hand_off.send(self.inputs[self._head])
