"""DecodeState: every persistent device buffer of one sequence, allocated once; and its bytes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from dsv4.caches.allocation import COMPUTE_DTYPES, allocate_layer, step_tokens
from dsv4.caches.draft import DraftState
from dsv4.caches.layer import AttentionState
from dsv4.caches.point import Point, undoable_tokens
from dsv4.channels import Channels
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.on_failure import OnFailure
from dsv4.peers import STEP_NUMBERS, Peers
from dsv4.stream_barrier import StreamBarrier
from dsv4.turns import Turns

# Points that are kept of a sequence, the latest ones: 27 MB each for V4-Pro.
MAX_POINTS = 4


@dataclass
class DecodeState:
    """Everything that a step reads and writes, except the weights. ``position_1`` int64 ``[1]``:
    tokens processed so far.

    One copy of the position lives on every device that owns layers (``positions_1``); the host
    never reads them inside a step, it keeps count in ``position``. Starting a new sequence means
    setting them to 0: every cache is addressed by absolute position and every read is masked by it,
    so nothing of the previous sequence can be seen. ``furthest`` is the largest position that this
    sequence has reached.

    ``rejected_1`` int64 ``[1]``, on every device too: how many of the last step's tokens the next
    step takes back first, where only the device knows the number (rejected drafts); the step sets
    it to 0. ``arrivals[source, target]``: where streams from another device arrive, ``[T, M, E]``
    of the longest step.

    ``channels``: the ways of decode steps between the devices of several stages; None where there
    are not several, or where they do not reach each other's memory. ``turns``: where kernels may
    wait for other devices.
    ``draft``: what a draft module keeps, where there is one.

    ``nan_1`` int32 ``[1]`` on the host, pinned where the devices are GPUs: not 0 once an op has met
    NaN among values that it compares, since ``forget_nan``. ``points``: where ``keep_point`` was
    called, by position, as far as the sequence has not gone back behind it since.

    With tensor parallelism this is the state of rank 0, and ``others`` are those of the other
    ranks: every rank writes the same rows for itself. The host counts for all of them here.
    ``peers``: what the rank shares with the others.
    """

    layers: tuple[AttentionState, ...]
    positions_1: dict[torch.device, Tensor]
    rejected_1: dict[torch.device, Tensor]
    arrivals: dict[tuple[torch.device, torch.device], Tensor]
    nan_1: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    position: int = 0
    furthest: int = 0
    points: tuple[Point, ...] = ()
    peers: Peers | None = None
    others: tuple["DecodeState", ...] = ()
    _steps_begun: int = 0
    draft: DraftState | None = None
    channels: Channels | None = None
    turns: Turns | None = None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        engine: EngineConfig,
        max_context: int,
        devices: tuple[torch.device, ...],
        planned: bool = False,
    ) -> "DecodeState":
        """``devices[l]`` owns layer l. ``planned``: on torch's meta device, to plan and record
        without memory.

        Raises nothing; the memory plan has checked that it fits.
        """

        def memory(device: torch.device) -> torch.device:
            return torch.device("meta") if planned else device

        layers = tuple(
            allocate_layer(config, engine, max_context, ratio, memory(device))
            for ratio, device in zip(config.compress_ratios, devices, strict=True)
        )
        positions, rejected = (
            {
                device: torch.zeros(1, dtype=torch.int64, device=memory(device))
                for device in dict.fromkeys(devices)
            }
            for _ in range(2)
        )
        streams = (step_tokens(engine), config.hc_mult, config.hidden_size)
        dtype = COMPUTE_DTYPES[engine.compute_dtype]
        arrivals = {
            (source, target): torch.empty(streams, dtype=dtype, device=memory(target))
            for source, target in sorted(set(pairwise(devices)), key=str)
            if source != target
        }
        pinned = not planned and any(device.type == "cuda" for device in devices)
        host = memory(torch.device("cpu"))
        nan_1 = torch.zeros(1, dtype=torch.int32, device=host, pin_memory=pinned)
        return cls(layers, positions, rejected, arrivals, nan_1)

    def joined(self, others: Sequence["DecodeState"], peers: Sequence[Peers]) -> "DecodeState":
        """This state as that of rank 0, with those of the other ranks; ``peers`` of all ranks."""
        own, *their = peers
        pairs = zip(others, their, strict=True)
        ranked = tuple(replace(state, nan_1=self.nan_1, peers=view) for state, view in pairs)
        return replace(self, peers=own, others=ranked)

    @property
    def ranks(self) -> tuple["DecodeState", ...]:
        """The states of all ranks."""
        return (self, *self.others)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(self.positions_1)

    @property
    def all_devices(self) -> tuple[torch.device, ...]:
        """Those of all ranks."""
        return tuple(dict.fromkeys(device for state in self.ranks for device in state.devices))

    def begin_step(self, steps: int) -> None:
        """Counts steps in which ranks exchange words, before they are queued."""
        self._steps_begun += steps

    def turn(self) -> AbstractContextManager[None]:
        """Around queueing what may wait for other devices."""
        return nullcontext() if self.turns is None else self.turns.taken()

    def place(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``position_1`` and ``rejected_1`` of a device."""
        return self.positions_1[device], self.rejected_1[device]

    def set_position(self, position: int) -> None:
        """Moves host and devices to ``position``: 0 starts a sequence, going back undoes tokens.

        Devices that an interruption left apart are brought together: what is queued behind this on
        any of them waits for all that is queued in front of it. Where an interruption ends this,
        all have moved none the less.
        """
        with OnFailure(self._move, position):
            self._move(position)

    def _move(self, position: int) -> None:
        devices = [device for device in self.all_devices if device.type == "cuda"]
        if len(devices) > 1:
            streams = [torch.cuda.current_stream(device) for device in devices]
            StreamBarrier(len(streams)).cross(streams)
        for state in self.ranks:
            state.move_devices(position, self._steps_begun)
        if self.channels is not None:
            self.channels.align()
        self.position = position
        self.points = tuple(point for point in self.points if point.position <= position)
        if position == 0:
            self.furthest = 0

    def move_devices(self, position: int, steps_begun: int) -> None:
        """Moves the devices of this rank alone to ``position``, and its exchanges behind those of
        all ``steps_begun``, wherever an interruption left them.
        """
        for device in self.devices:
            self.positions_1[device].fill_(position)
            self.rejected_1[device].zero_()
        if self.peers is not None:
            self.peers.step_4[:1].fill_(steps_begun % STEP_NUMBERS)

    def resume(self, position: int, furthest: int) -> None:
        """Moves from the beginning to ``position`` of a sequence that has reached ``furthest``,
        whose rows are there (``filled_rows``).
        """
        if self.draft is not None:
            self.draft.forget()
        self.furthest = furthest
        self.set_position(position)

    def start_sequence(self) -> None:
        """Moves to position 0, with nothing met."""
        self.set_position(0)
        self.forget_nan()

    @property
    def met_nan(self) -> bool:
        """Whether a step that is done has met NaN among values that it compares."""
        return bool(self.nan_1)

    def forget_nan(self) -> None:
        """Waits for the steps that are queued, and forgets what they and others have met."""
        self.wait()
        self.nan_1.zero_()

    def wait(self) -> None:
        """Waits for the steps that are queued."""
        for device in self.all_devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def rollback(self, position: int) -> None:
        """Takes tokens back, to ``position``. Raises ``ValueError`` beyond what the caches hold."""
        lowest = self.position - self.undoable_tokens
        if not lowest <= position <= self.position:
            raise ValueError(f"position: found {position}, expected {lowest} to {self.position}")
        if position != self.position:
            self.set_position(position)

    def keep_point(self) -> None:
        """Remembers what the rings hold, so that ``go_back`` reaches this position from any other
        one behind it. Nothing at position 0, which needs no rows.
        """
        if self.position and all(point.position != self.position for point in self.points):
            self.wait()
            point = Point.of(self.layers, self.draft, self.position, self.furthest)
            self.points = (*self.points, point)[-MAX_POINTS:]

    def reachable(self, position: int) -> int:
        """The furthest position up to ``position`` that ``go_back`` can move to, 0 if none."""
        places = [
            min(position, place.position)
            for place in (self, *self.points)
            if place.position - place.undoable_tokens <= position
        ]
        return max(places, default=0)

    def go_back(self, position: int) -> None:
        """Takes tokens back, to ``position``, by a point where the rings alone do not reach so far.
        Raises ``ValueError`` for a position that is not ``reachable``.
        """
        for place in (self, *reversed(self.points)):
            if place.position - place.undoable_tokens <= position <= place.position:
                break
        else:
            raise ValueError(
                f"position: found {position}, expected one that {self.position} tokens and "
                f"{len(self.points)} points reach"
            )
        if isinstance(place, Point):
            with OnFailure(self.set_position, 0):
                self._restore(place)
                self.set_position(position)
        else:
            self.set_position(position)

    def _restore(self, point: Point) -> None:
        for state in self.ranks:
            point.restore(state.layers, state.draft)
        self.furthest = point.furthest
        if self.draft is not None:
            self.draft.forget()
            if point.has_draft:
                self.draft.resume(point.position, point.undoable_tokens)

    def advance(self, tokens: int) -> None:
        """Counts ``tokens`` that are queued on the devices: called by the step that moves the
        devices' positions.
        """
        if self.draft is not None:
            self.draft.begin(self.position, tokens)
        self.position += tokens
        self.furthest = max(self.furthest, self.position)

    def appending(self) -> AbstractContextManager[None]:
        """For a block that advances and queues or computes the step. Where an error or an
        interruption ends it, the sequence ends where it did before, or at the last position that
        can be gone back to: what a long step wrote cannot be taken back.
        """
        return OnFailure(self._return_to, self.position)

    def _return_to(self, position: int) -> None:
        reached = self.reachable(position)
        if reached:
            self.go_back(reached)
        else:
            self.set_position(0)

    def staying(self) -> AbstractContextManager[None]:
        """For a block that queues a step which appends nothing: an error or an interruption leaves
        no device behind another one.
        """
        return OnFailure(self.set_position, self.position)

    @property
    def undoable_tokens(self) -> int:
        """How many of the last tokens can be taken back: 8, or as far as the rings reach behind
        ``furthest``.
        """
        return undoable_tokens(self.position, self.furthest)
