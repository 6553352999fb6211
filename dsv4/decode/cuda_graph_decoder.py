"""CUDAGraphDecoder: decode steps as replays of captured graphs, on a stream of its own per device.

Two modes run the same recorded step. ``full``: one graph per device, attention included (per
segment where devices do not reach each other's memory). ``split``: per layer a Graph A (mHC seam,
norm, projections) and a Graph B (mHC seam, router, experts), and between them attention (RoPE, KV
write, compressor, indexer, top-k, FMHA, inverse RoPE, output projection) launched eagerly, so that
any attention can be put there; then a graph for what is behind the layers. Steps that are dense
(docs/decode.md#dense-steps) have graphs of their own where they differ. How a token flows is drawn
in docs/decode.md.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dsv4.layers.values import Wants
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.sampling import Sampler
from dsv4.step.captured import AnyCaptured, CapturedRanks, CapturedStep, Mode
from dsv4.step.current_device import on_device
from dsv4.step.lock_step import AnyStep, LockStep
from dsv4.step.steps import RecordedSteps
from dsv4.step.token_loop import TokenLoop


class CUDAGraphDecoder:
    """Replays the decode steps of ``steps``; complete when constructed."""

    def __init__(
        self,
        steps: RecordedSteps,
        mode: Mode,
        max_context: int,
        lengths: Sequence[int] = (1,),
        traced: Wants | None = None,
    ) -> None:
        """Captures a step of each of ``lengths`` tokens (1 to 8), after one eager run of it, which
        loads its kernels. That run writes behind the current position, and the next step overwrites
        it.

        ``traced``: the steps keep the values that it wants (``Step.show``). Raises ``ValueError``
        for a length out of range, and without room for the longest step.
        """
        for tokens in lengths:
            if not 1 <= tokens <= MAX_DECODE_TOKENS:
                raise ValueError(f"tokens: found {tokens}, expected 1 to {MAX_DECODE_TOKENS}")
        self.steps = steps
        self.state = steps.state
        self.max_context = max_context
        self.mode: Mode = mode
        devices = self.state.all_devices
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._entered = {device: torch.cuda.Event() for device in devices}
        self._left = {device: torch.cuda.Event() for device in devices}
        self._pool: tuple[int, int] = torch.cuda.graph_pool_handle()
        self._check_room(self.state.position, max(lengths))
        built = [steps.step(n) if traced is None else steps.traced_step(n, traced) for n in lengths]
        self._captured = {step.tokens: self._capture(step) for step in built}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per step, of every step that was captured."""
        return tuple(self._captured)

    @property
    def regions(self) -> tuple[str, ...]:
        """The captured regions of the first step, in order."""
        return tuple(next(iter(self._captured.values())).regions)

    def traced(self, wants: Wants) -> "CUDAGraphDecoder":
        """A decoder of the same mode for single tokens, whose step keeps the values that ``wants``
        names.
        """
        return CUDAGraphDecoder(self.steps, self.mode, self.max_context, traced=wants)

    def step(self, tokens: int) -> AnyStep:
        """The step of this many tokens."""
        return self._captured[tokens].step

    @torch.inference_mode()
    def replay(self, token_ids: int | Sequence[int], position: int) -> Tensor:
        """The step that appends ``token_ids`` at ``position``: float32 logits ``[T, V]``,
        overwritten by the next step.

        ``position`` is the current one or up to 8 tokens before it: rejected drafts are taken back
        by it. Raises ``ValueError`` for a number of tokens that was not captured, a position out of
        reach, and at the context's end.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if len(ids) not in self._captured:
            expected = " or ".join(map(str, self._captured))
            raise ValueError(f"token_ids: found {len(ids)} tokens, expected {expected} as captured")
        self._check_room(position, len(ids))
        self.state.rollback(position)
        captured = self._captured[len(ids)]
        assert captured.step.feed is not None
        with self.state.appending(), self._entered_from_outside():
            self.state.advance(len(ids))
            captured.step.feed.put(ids)
            captured.run(position + len(ids))
        return captured.step.logits_TV

    @torch.inference_mode()
    def generate(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens that follow ``token``, one step each, sampled on the device.

        A step takes its token from the device, and the host stays up to four steps behind. Steps
        that were queued in vain, because the caller closed the generator, are taken back. Raises
        ``ValueError`` unless captured for one token, ``FloatingPointError`` for NaN logits.
        """
        if 1 not in self._captured:
            raise ValueError(f"generate: found steps of {self.lengths} tokens, expected one of 1")
        self._check_room(self.state.position, steps)
        yield from self.singly(token, sampler, steps)

    @torch.inference_mode()
    def singly(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """``generate`` by steps of one token, whatever else is captured."""
        captured = self._captured[1]
        # The loop takes the captured step, because a traced step has an input of its own.
        loop = TokenLoop(captured.step, self.state, self.steps.sampler, self.steps.ring)
        tokens = loop.generate(token, sampler, steps, captured.run_and_sample)
        yield from self._on_streams(tokens)

    def _on_streams(self, tokens: Generator[int, None, None]) -> Generator[int, None, None]:
        """``tokens``, each made on the own streams."""
        self._enter()
        try:
            while True:
                # Between two tokens the caller's own streams are the current ones.
                with self._on_own_streams():
                    found = next(tokens, None)
                if found is None:
                    return
                yield found
        finally:
            self._leave()
            tokens.close()

    def _capture(self, step: AnyStep) -> AnyCaptured:
        with self._capturing():
            assert step.feed is not None
            for end in step.recorded.ends(self.max_context):
                step.feed.put([0] * step.tokens)
                step.run(step.tokens, end)
                step.sample()
                # The host has counted nothing of this: it moves the devices back.
                self.state.set_position(self.state.position)
            return self._captured_step(step)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """On the own streams, behind all that is queued; what runs there moves no position."""
        position = self.state.position
        for device in self._streams:
            torch.cuda.synchronize(device)
        try:
            # Nobody else's turn: an event of another engine would join the capture.
            with torch.inference_mode(), self._on_own_streams(), self.state.turn():
                yield
        finally:
            self.state.set_position(position)

    def _captured_step(self, step: AnyStep) -> AnyCaptured:
        """The step, which has run on the own streams."""
        for stream in self._streams.values():
            stream.synchronize()
        if isinstance(step, LockStep):
            ranks = (step, self.state, self._streams, self.mode, self._pool)
            return CapturedRanks(*ranks, self.max_context)
        return CapturedStep(step, self._streams, self.mode, self._pool, self.max_context)

    def _check_room(self, position: int, tokens: int) -> None:
        if position + tokens > self.max_context:
            found = f"{position} + {tokens} tokens"
            raise ValueError(f"position: found {found}, expected at most {self.max_context}")

    @contextmanager
    def _on_own_streams(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(on_device(self.steps.head))
            yield

    @contextmanager
    def _entered_from_outside(self) -> Iterator[None]:
        """On the own streams, behind what the caller's streams have queued; they wait for what is
        queued here.
        """
        self._enter()
        try:
            with self._on_own_streams():
                yield
        finally:
            self._leave()

    def _enter(self) -> None:
        for device, stream in self._streams.items():
            self._entered[device].record(torch.cuda.current_stream(device))
            stream.wait_event(self._entered[device])

    def _leave(self) -> None:
        for device, stream in self._streams.items():
            self._left[device].record(stream)
            torch.cuda.current_stream(device).wait_event(self._left[device])
