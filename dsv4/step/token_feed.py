"""The token ids that steps read: static memory on every device, filled by the host or by the
sampler.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsv4.channels import Channels, Ends
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.parallel.hand_off import HandOff

_TURNS = 4


def given_by_host(
    inputs: Mapping[torch.device, Tensor], head: torch.device, channels: Channels | None
) -> dict[Ends, Tensor]:
    """For every channel that brings the token of a step of one from the device that samples,
    ``head``: int64 ``[1]`` on the other device, which is not 0 where the host has given it. Empty
    for longer ``inputs``, and without channels.
    """
    if channels is None or inputs[head].shape[0] > 1:
        return {}
    return {
        (head, device): torch.zeros_like(tokens_T)
        for device, tokens_T in inputs.items()
        if device != head
    }


class TokenFeed:
    """``inputs``: int64 ``[T]`` per device. The host's ids come through pinned memory; a token that
    the head's device has chosen goes on to the others: where there is ``given`` (``given_by_host``)
    the step sends it, else ``pass_on``.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        head: torch.device,
        tokens: int,
        memory: Mapping[torch.device, Tensor] | None = None,
        channels: Channels | None = None,
    ) -> None:
        """``head`` is the device that samples. ``memory``: whose first places are the inputs; there
        steps send no token. ``channels``: between the devices.
        """
        self._head = head
        if memory is None:
            self.inputs = {
                device: torch.zeros(tokens, dtype=torch.int64, device=device) for device in devices
            }
            self.given = given_by_host(self.inputs, head, channels)
        else:
            self.inputs = {device: memory[device][:tokens] for device in devices}
            self.given = {}
        self._others = [device for device in devices if device != head]
        by_hand = [] if self.given else self._others
        self._hand_offs = [HandOff(head, self.inputs[device]) for device in by_hand]
        self._sends = channels is not None and tokens <= MAX_DECODE_TOKENS
        self._one_1 = torch.ones(1, dtype=torch.int64, pin_memory=True)
        self._pinned = torch.zeros((_TURNS, tokens), dtype=torch.int64, pin_memory=True)
        self._copied = [{device: torch.cuda.Event() for device in devices} for _ in range(_TURNS)]
        self._puts = 0

    def put(self, token_ids: Sequence[int]) -> None:
        """Queues copies of the ids to the first places of every device's input, on the devices'
        current streams.

        Pinned memory is written again only when it has been read. A decode step that is given
        tokens begins when all that is queued on the head's device has ended: what the steps in
        front have sent is read by then.
        """
        if self._sends:
            done = torch.cuda.current_stream(self._head).record_event()
            for device in self._others:
                torch.cuda.current_stream(device).wait_event(done)
        turn = self._puts % _TURNS
        self._puts += 1
        for event in self._copied[turn].values():
            event.synchronize()
        pinned: Tensor = self._pinned[turn, : len(token_ids)]
        pinned.copy_(torch.tensor(token_ids, dtype=torch.int64))
        for device, tokens_T in self.inputs.items():
            tokens_T[: len(token_ids)].copy_(pinned, non_blocking=True)
            self._copied[turn][device].record(torch.cuda.current_stream(device))
        for given_1 in self.given.values():
            given_1.copy_(self._one_1, non_blocking=True)

    def pass_on(self) -> None:
        """Queues the head's input to the other devices where no step sends it, on the current
        streams.
        """
        for hand_off in self._hand_offs:
            hand_off.send(self.inputs[self._head])
