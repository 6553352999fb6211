"""A step that can run: a recorded one whose buffers have memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from dsv4.launch.program import Memory, Program
from dsv4.layers.values import Seen, completed_rows
from dsv4.parallel.hand_off import HandOff
from dsv4.step.current_device import on_device
from dsv4.step.observer import Observer
from dsv4.step.parts import AnyPart, Barrier, Part, Transfer
from dsv4.step.recorded import RecordedStep
from dsv4.step.token_feed import TokenFeed

HandOffs = Mapping[tuple[torch.device, torch.device], HandOff]


def is_sample(part: AnyPart) -> bool:
    """Whether it chooses the next token, which steps of given tokens leave out."""
    return isinstance(part, Part) and part.kind == "sample"


class Step:
    """Runs the parts of ``recorded`` in order, each on the current stream of its device."""

    def __init__(
        self,
        recorded: RecordedStep,
        memory: Mapping[torch.device, Memory],
        hand_offs: HandOffs,
        feed: TokenFeed | None = None,
    ) -> None:
        """A device without ``memory``, or with too little, gets memory of the step's own. ``feed``:
        its input.
        """
        self.recorded = recorded
        self.feed = feed
        self.programs = {
            device: Program(recording, memory.get(device))
            for device, recording in recorded.recordings.items()
        }
        self._hand_offs = hand_offs
        self.head_program = self.programs[recorded.head]
        self.model_parts = [part for part in recorded.parts if not is_sample(part)]
        self.sample_parts = [part for part in recorded.parts if is_sample(part)]
        self._model = self._actions(self.model_parts)

    @property
    def tokens(self) -> int:
        """The most tokens of a run."""
        return self.recorded.tokens

    @property
    def hidden_TE(self) -> Tensor:
        """Final hidden states of the last run, ``[T, E]``."""
        return self.head_program.tensor(self.recorded.outputs.hidden_TE)

    @property
    def logits_TV(self) -> Tensor:
        """float32 ``[T, V]`` of the last run."""
        assert self.recorded.outputs.logits_TV is not None, "this step computes no logits"
        return self.head_program.tensor(self.recorded.outputs.logits_TV)

    @property
    def token(self) -> Tensor:
        """The token that was sampled last, int64 scalar."""
        assert self.recorded.token is not None, "this step samples no token"
        return self.head_program.tensor(self.recorded.token)

    def show(self, seen: Seen, position: int) -> None:
        """The kept values of a traced step's last run, at ``position``, on the host."""
        for name, device, tensor, ratio in self.recorded.values:
            rows = completed_rows(position, self.tokens, ratio)
            seen(name, self.programs[device].tensor(tensor)[:rows].cpu())

    def run(self, tokens: int, end: int | None = None, observer: Observer | None = None) -> None:
        """Queues the model's parts for this many tokens, behind which the sequence has at most
        ``end``; None: any number.
        """
        dense = self.recorded.is_dense(end)
        with self.recorded.turn():
            if observer is None:
                for action in self._model:
                    action(tokens, dense)
                return
            for part in self.model_parts:
                self.run_part(part, tokens, dense, observer)

    def sample(self, observer: Observer | None = None) -> None:
        """Queues the choice of the next token, which goes to every other device once."""
        with self.recorded.turn(uses=1):
            for part in self.sample_parts:
                self.run_part(part, 1, observer=observer)

    def run_part(
        self, part: AnyPart, tokens: int, dense: bool = False, observer: Observer | None = None
    ) -> None:
        """Queues one part, item by item where somebody watches."""
        assert not isinstance(part, Barrier), "a barrier is of all ranks"
        if isinstance(part, Transfer):
            with nullcontext() if observer is None else observer.hand_off(part.source, part.target):
                self._send(part, tokens)
            return
        program = self.programs[part.device]
        if observer is None:
            with torch.cuda.device(part.device):
                program.run(tokens, part.start, part.stop, dense)
        else:
            with on_device(part.device), observer.part(part.name, part.device, part.layer):
                for index, name in self.recorded.launched(part, tokens, dense):
                    with observer.item(name):
                        program.run(tokens, index, index + 1, dense)
        self._drain(part)

    def _send(self, transfer: Transfer, tokens: int) -> None:
        streams_TME = self.programs[transfer.source].tensor(transfer.tensor)
        self._hand_offs[transfer.source, transfer.target].send(streams_TME[:tokens])

    def _drain(self, part: Part) -> None:
        if part.drains is not None:
            self._hand_offs[part.drains, part.device].drain()

    def _actions(self, parts: Sequence[AnyPart]) -> list[Callable[[int, bool], None]]:
        """Consecutive parts of one device run as one range; a part that drains a hand-off ends its
        range.
        """
        actions: list[Callable[[int, bool], None]] = []
        ranges = 0

        def group(part: AnyPart) -> tuple[object, int]:
            nonlocal ranges
            key = (part.device, ranges) if isinstance(part, Part) else (part, ranges)
            ranges += isinstance(part, Part) and part.drains is not None
            return key

        for _, found in groupby(parts, group):
            run = list(found)
            first = run[0]
            last = run[-1]
            if isinstance(first, Part) and isinstance(last, Part):
                merged = Part(first.kind, first.device, None, first.start, last.stop, last.drains)
                actions.append(partial(self.run_part, merged))
            else:
                actions.append(partial(self.run_part, first))
        return actions
