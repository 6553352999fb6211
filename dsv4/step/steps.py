"""The recorded steps of an engine, side by side on one state: decode steps by length, prefill,
logits.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.launch.compiler import compile_ahead
from dsv4.launch.program import Memory
from dsv4.launch.target import Target
from dsv4.layers.values import Wants, Watch
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Transformer
from dsv4.ops.tables import RecordedTable
from dsv4.parallel.hand_off import HandOff
from dsv4.sampling import Sampler, SamplerState, checked_token
from dsv4.step.observer import Observer
from dsv4.step.recorded import (
    RecordedStep,
    StepRecorder,
    TokenLoopMemory,
    log_unusual_kernels,
    record_logits,
    record_step,
)
from dsv4.step.step import Step
from dsv4.step.token_feed import TokenFeed
from dsv4.step.token_loop import TokenLoop, TokenRing
from dsv4.step.traced_values import TracedValues

Progress = Callable[[int, int], None]


class RecordedSteps:
    """Every step of an engine. Steps share one workspace per device, so each overwrites what the
    one before returned. ``observer`` sees them, item by item.
    """

    def __init__(
        self,
        model: Transformer,
        state: DecodeState,
        table: RecordedTable,
        prefill_tokens: int,
        compiling: Progress | None = None,
    ) -> None:
        """Records the decode step of one token and the prefill step of up to ``prefill_tokens``,
        compiles their kernels (``compiling(done, total)`` is told) and gives them memory. Other
        lengths are built when they are first run.
        """
        self.model = model
        self.state = state
        self.table = table
        self.observer: Observer | None = None
        self.head = model.head_device
        self._targets = {device: Target.of(device) for device in state.devices}
        self.hand_offs = {
            (source, target): HandOff(source, arrived)
            for (source, target), arrived in state.arrivals.items()
        }
        self.sampler = SamplerState.allocate(self.head)
        self.ring = TokenRing(self.head)
        self._prefill_tokens = prefill_tokens
        self._memory: dict[torch.device, Memory] = {}
        self._steps: dict[int, Step] = {}
        self._logits: dict[int, tuple[Step, Tensor]] = {}
        lengths = [1, MAX_DECODE_TOKENS]
        if prefill_tokens > MAX_DECODE_TOKENS:
            lengths.append(prefill_tokens)
        recorded = {tokens: self._record(tokens) for tokens in lengths}
        kernels = {kernel for step, _ in recorded.values() for kernel in step.kernels()}
        compile_ahead(kernels, compiling)
        log_unusual_kernels([step for step, _ in recorded.values()])
        sizes = [step.workspace_bytes() for step, _ in recorded.values()]
        for device in state.devices:
            self._memory[device] = Memory(device, max(size[device] for size in sizes))
        # The step of 8 tokens says how much memory decoding takes at most; it is built when it is
        # first run.
        del recorded[MAX_DECODE_TOKENS]
        for tokens, (step, feed) in recorded.items():
            self._steps[tokens] = Step(step, self._memory, self.hand_offs, feed)
        self.loop = TokenLoop(self.step(1), state, self.sampler, self.ring)
        # The first token of a prompt comes of it: nothing is built inside the first ``generate``.
        self._logits_step(1)

    def step(self, tokens: int) -> Step:
        """The step that runs this many tokens: of exactly as many up to 8, else the prefill step.

        With ops of torch among its own a prefill step serves one length; only the last one is kept.
        """
        length = self._length(tokens)
        if length not in self._steps:
            if length > MAX_DECODE_TOKENS:
                for other in [key for key in self._steps if key > MAX_DECODE_TOKENS]:
                    del self._steps[other]
            self._steps[length] = self._build(length)
        return self._steps[length]

    def traced_step(self, tokens: int, wants: Wants) -> Step:
        """A decode step that keeps its values on the device (``Step.show``)."""
        return self._build(tokens, TracedValues(wants, self.state))

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens: final hidden states ``[T, E]``, overwritten by the next step."""
        return self._run(self.step(len(token_ids)), token_ids).hidden_TE[: len(token_ids)]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Appends 1 to 8 tokens: float32 logits ``[T, V]``, overwritten by the next step."""
        return self._run(self.step(len(token_ids)), token_ids).logits_TV

    def traced(self, watch: Watch) -> Callable[[Sequence[int]], Tensor]:
        """``run`` in steps of their own, which show ``watch`` their values."""
        built: dict[int, Step] = {}

        @torch.inference_mode()
        def run(token_ids: Sequence[int]) -> Tensor:
            length = self._length(len(token_ids))
            if length not in built:
                traced = TracedValues(watch.wants, self.state, watch.seen)
                built[length] = self._build(length, traced, logits=False)
            return self._run(built[length], token_ids).hidden_TE[: len(token_ids)]

        return run

    @torch.inference_mode()
    def logits(self, hidden_TE: Tensor) -> Tensor:
        """float32 ``[T, V]`` of final hidden states, overwritten by the next step."""
        return self._run_logits(hidden_TE).logits_TV[: hidden_TE.shape[0]]

    @torch.inference_mode()
    def first_token(self, sampler: Sampler, hidden_TE: Tensor) -> int:
        """The token behind a prompt whose last hidden state is the last row.

        Raises ``FloatingPointError`` for NaN.
        """
        self.sampler.load(sampler)
        step = self._run_logits(hidden_TE[-1:])
        step.sample(self.observer)
        token = checked_token(int(step.token), self.state.position, self.state.met_nan)
        sampler.note(step.logits_TV[-1], step.token)
        return token

    def following(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens behind ``token``, one step each, sampled on the device."""
        run = None
        sample = None
        if self.observer is not None:
            run = partial(self._queue, self.step(1), 1)
            sample = partial(self.step(1).sample, self.observer)
        with closing(self.loop.generate(token, sampler, steps, run, sample)) as tokens:
            yield from tokens

    def _run(self, step: Step, token_ids: Sequence[int]) -> Step:
        assert step.feed is not None
        step.feed.put(token_ids)
        self.state.advance(len(token_ids))
        self._queue(step, len(token_ids))
        return step

    def _queue(self, step: Step, tokens: int) -> None:
        if self.observer is not None:
            self.observer.begin_step()
        step.run(tokens, self.observer)

    def _run_logits(self, hidden_TE: Tensor) -> Step:
        rows = hidden_TE.shape[0]
        step, rows_TE = self._logits_step(rows)
        rows_TE[:rows].copy_(hidden_TE)
        step.run(rows, self.observer)
        return step

    def _logits_step(self, rows: int) -> tuple[Step, Tensor]:
        """The step for the logits of this many hidden states, and its input."""
        length = rows if rows <= MAX_DECODE_TOKENS else max(rows, self._prefill_tokens)
        if length not in self._logits:
            embed = self.model.embed
            shape = (length, embed.table_VE.shape[1])
            rows_TE = torch.empty(shape, dtype=embed.compute_dtype, device=self.head)
            recorded = record_logits(
                self.model, self.table, self._targets[self.head], rows_TE, self.state, self.sampler
            )
            memory = self._memory if length <= MAX_DECODE_TOKENS else {}
            self._logits[length] = Step(recorded, memory, {}), rows_TE
        return self._logits[length]

    def _length(self, tokens: int) -> int:
        """The length of the step that runs this many tokens."""
        exact = self.table.exact or tokens <= MAX_DECODE_TOKENS
        return tokens if exact else self._prefill_tokens

    def _build(self, tokens: int, traced: TracedValues | None = None, logits: bool = True) -> Step:
        recorded, feed = self._record(tokens, traced, logits)
        compile_ahead(recorded.kernels())
        keeps = traced is not None and traced.keeps
        memory = {} if keeps else self._memory
        return Step(recorded, memory, self.hand_offs, feed)

    def _record(
        self, tokens: int, traced: TracedValues | None = None, logits: bool = True
    ) -> tuple[RecordedStep, TokenFeed]:
        feed = TokenFeed(self.state.devices, self.head, tokens)
        recorder = StepRecorder(self.table, self._targets, self.state, feed.inputs, traced)
        has_logits = logits and tokens <= MAX_DECODE_TOKENS
        one = has_logits and tokens == 1
        loop = TokenLoopMemory(self.sampler, self.ring.tokens) if one else None
        return record_step(self.model, self.state, recorder, has_logits, loop), feed
