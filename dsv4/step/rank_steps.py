"""The recorded steps of one rank: recording them, and giving them memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.launch.program import Memory
from dsv4.launch.target import Target
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Transformer
from dsv4.ops.tables import RecordedTable
from dsv4.parallel.hand_off import HandOff
from dsv4.sampling import SamplerState
from dsv4.step.along import Along
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import StepRecorder, TokenLoopMemory, record_logits, record_step
from dsv4.step.step import Step
from dsv4.step.token_feed import TokenFeed
from dsv4.step.token_ring import TokenRing
from dsv4.step.traced_values import TracedValues


class RankSteps:
    """Steps of one rank's model and state. They share one workspace per device, so each overwrites
    what the one before returned; only those of logits have memory of their own.
    """

    def __init__(
        self, model: Transformer, state: DecodeState, table: RecordedTable, along: Along | None
    ) -> None:
        self.model = model
        self.state = state
        self.table = table
        self.along = along
        self.head = model.head_device
        self.sampler = SamplerState.allocate(self.head)
        self.ring = TokenRing(self.head)
        self.hand_offs = {
            (source, target): HandOff(source, arrived)
            for (source, target), arrived in state.arrivals.items()
        }
        self.targets = {device: Target.of(device) for device in state.devices}
        self.memory: dict[torch.device, Memory] = {}

    def allocate(self, steps: Iterable[RecordedStep]) -> None:
        """Makes the workspace that each of ``steps`` fits into."""
        sizes = [step.workspace_bytes() for step in steps]
        for device in self.state.devices:
            nbytes = max(size.get(device, 0) for size in sizes)
            self.memory[device] = Memory(device, nbytes)

    def record(
        self,
        tokens: int,
        traced: TracedValues | None = None,
        logits: bool = True,
        alone: bool = False,
    ) -> tuple[RecordedStep, TokenFeed]:
        """A step of the model, with its input; ``alone``: nothing runs along with it."""
        along = None if alone or self.along is None else (self.along, self.sampler)
        shared = None
        if along is not None and tokens <= MAX_DECODE_TOKENS:
            shared = along[0].inputs
        feed = TokenFeed(self.state.devices, self.head, tokens, shared, self.state.channels)
        recorder = StepRecorder(self.table, self.targets, self.state, feed.inputs, traced)
        recorder.await_tokens(feed.given)
        loop = TokenLoopMemory(self.sampler, self.ring.tokens)
        return record_step(self.model, self.state, recorder, loop, along, logits), feed

    def own_steps(self) -> tuple[list[RecordedStep], list[RecordedStep]]:
        """What runs along has beside the steps of the model, and what of it has memory of its
        own.
        """
        if self.along is None:
            return [], []
        apart = self.along.steps_apart(self.targets[self.head])
        return self.along.own_steps(self.targets, self.sampler), apart

    def ready(self, recorded: RecordedStep, feed: TokenFeed, apart: bool = False) -> Step:
        """A step with memory: its own if it is to be ``apart``."""
        memory = {} if apart else self.memory
        return Step(recorded, memory, self.hand_offs, feed)

    def logits_step(self, rows: int) -> tuple[Step, Tensor]:
        """The step for the logits of this many hidden states, and its input."""
        embed = self.model.embed
        shape = (rows, embed.table_VE.shape[1])
        rows_TE = torch.empty(shape, dtype=embed.compute_dtype, device=self.head)
        recorded = record_logits(
            self.model, self.table, self.targets[self.head], rows_TE, self.state, self.sampler
        )
        # In memory of its own, a few megabytes: the hidden states of a prompt stay where they are.
        return Step(recorded, {}, {}), rows_TE
