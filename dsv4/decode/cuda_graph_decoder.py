"""CUDAGraphDecoder: decode steps as replays of captured graphs, on a stream of its own per device.

Two modes run the same model code. ``full``: one graph per device segment, attention included. ``split``: per layer a
Graph A (mHC seam, norm, projections) and a Graph B (mHC seam, router, experts), and between them attention (KV write,
compressor, indexer, top-k, FMHA, inverse RoPE, output projection) launched eagerly, so that any attention can be put
there. How a token flows is drawn in docs/decode.md.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dsv4.config import MAX_DECODE_TOKENS, STEPS_AHEAD
from dsv4.decode.captured_step import CapturedStep, Mode, capture_graph
from dsv4.decode.token_feed import TokenFeed
from dsv4.decode.token_ring import TokenRing
from dsv4.model import Transformer, on_device
from dsv4.ops import Ops
from dsv4.sampling import Sampler, checked_token
from dsv4.state import DecodeState


class CUDAGraphDecoder:
    """Replays decode steps of ``model`` on ``state``.

    With ``keep_streams``, ``step.block_streams`` holds the streams ``[T, M, E]`` after every block of the last replay.
    """

    def __init__(
        self,
        model: Transformer,
        state: DecodeState,
        ops: Ops,
        mode: Mode,
        max_context: int,
        keep_streams: bool = False,
    ) -> None:
        """Raises ``ValueError`` when model and state are not on the same CUDA devices."""
        devices = tuple(dict.fromkeys(segment.device for segment in model.segments))
        if devices != state.devices or any(device.type != "cuda" for device in devices):
            found = f"a model on {_names(devices)} and a state on {_names(state.devices)}"
            raise ValueError(f"state: found {found}, expected the same CUDA devices")
        self.model, self.state, self.max_context = model, state, max_context
        self.mode: Mode = mode
        self.step: CapturedStep | None = None
        self._keep_streams = keep_streams
        self._head_device = model.segments[-1].device
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._entered = {device: torch.cuda.Event() for device in devices}
        self._left = {device: torch.cuda.Event() for device in devices}
        self._ring = TokenRing(self._head_device, ops)
        self._feed = TokenFeed(self._streams, self._head_device, 1)
        self._sampling: tuple[object, torch.cuda.CUDAGraph, Tensor] | None = None

    @property
    def tokens(self) -> int:
        """Tokens per step as captured; 0 before ``capture``."""
        return 0 if self.step is None else self._feed.count

    @property
    def regions(self) -> tuple[str, ...]:
        """What was captured, in the order of a step."""
        return () if self.step is None else tuple(self.step.regions)

    @torch.inference_mode()
    def capture(self, tokens: int = 1) -> None:
        """Captures steps of ``tokens`` tokens (1 to 8) after one eager step, which compiles what is not compiled yet.

        What that step writes lies behind the current position and is overwritten by the next one. If the capture is
        interrupted, steps run eagerly. Raises ``ValueError`` without room for the step.
        """
        if not 1 <= tokens <= MAX_DECODE_TOKENS:
            raise ValueError(f"tokens: found {tokens}, expected 1 to {MAX_DECODE_TOKENS}")
        position = self.state.position
        self._check_room(position, tokens)
        self.step = self._sampling = None
        self._feed = TokenFeed(self._streams, self._head_device, tokens)
        for device in self._streams:
            torch.cuda.synchronize(device)
        try:
            with self._on_own_streams():
                self._eager_step([0] * tokens)
                self._synchronize()
                self.step = CapturedStep(
                    self.model, self.state, self._streams, self._feed.inputs, self.mode, self._keep_streams
                )
        finally:
            self.state.set_position(position)

    @torch.inference_mode()
    def replay(self, token_ids: int | Sequence[int], position: int) -> Tensor:
        """The step that appends ``token_ids`` at ``position``: float32 logits ``[T, V]``, overwritten by the next step.

        ``position`` is the current one or up to 8 tokens before it: rejected drafts are taken back by it.
        Without a capture the step runs eagerly. Raises ``ValueError`` for another number of tokens than captured, for a
        position out of reach, and at the end of the context.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if self.step is not None and len(ids) != self.tokens:
            raise ValueError(f"token_ids: found {len(ids)} tokens, expected {self.tokens} as captured")
        lowest = self.state.position - self.state.undoable_tokens
        if not lowest <= position <= self.state.position:
            raise ValueError(f"position: found {position}, expected {lowest} to {self.state.position}")
        self._check_room(position, len(ids))
        if position != self.state.position:
            self.state.set_position(position)
        self.state.advance(len(ids))
        if self.step is None:
            return self._eager_step(ids)
        with self._entered_from_outside():
            self._feed.put(ids)
            self.step.launch()
        return self.step.logits

    @torch.inference_mode()
    def generate(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens that follow ``token``, one step each, sampled on the device.

        A step takes its token from the device, and the host stays up to four steps behind. Steps that were queued in
        vain, because the caller closed the generator, are taken back. Raises ``ValueError`` unless captured for one
        token, ``FloatingPointError`` for NaN logits.
        """
        if self.step is None or self.tokens != 1:
            raise ValueError(f"generate: found a capture of {self.tokens} tokens, expected 1")
        start, queued, read = self.state.position, 0, 0
        self._check_room(start, steps)
        with self._entered_from_outside():
            sampling = self._sampling_graph(self.step, sampler)
            self._feed.put([token])
        try:
            while read < steps:
                with self._on_own_streams():
                    while queued < min(steps, read + STEPS_AHEAD):
                        self._launch(self.step, sampling)
                        queued += 1
                read += 1
                yield checked_token(self._ring.read(start + read), start + read)
        finally:
            self._leave()
            self.state.set_position(start + read)

    def _launch(self, step: CapturedStep, sampling: torch.cuda.CUDAGraph) -> None:
        """Queues a step, the choice of its token, and the way of that token to the host and to every device."""
        step.launch()
        self.state.advance(1)
        sampling.replay()
        self._ring.mark(self.state.position)
        self._feed.pass_on()

    def _sampling_graph(self, step: CapturedStep, sampler: Sampler) -> torch.cuda.CUDAGraph:
        """Sampling and the store of the token; captured again only when the sampler draws differently."""
        if self._sampling is None or self._sampling[0] != sampler.key:
            self._sampling = None
            position_1 = self.state.positions_1[self._head_device]

            def body() -> Tensor:
                token = sampler(step.logits[-1], position_1)
                self._ring.store(token, position_1, self._feed.inputs[self._head_device])
                return token

            with on_device(self._head_device):
                body()
            self._synchronize()
            self._sampling = sampler.key, *capture_graph(self._streams[self._head_device], step.pool, body)
        return self._sampling[1]

    def _eager_step(self, ids: list[int]) -> Tensor:
        return self.model.logits(self.model(self.state.token_input(ids), self.state))

    def _check_room(self, position: int, tokens: int) -> None:
        if position + tokens > self.max_context:
            raise ValueError(f"position: found {position} + {tokens} tokens, expected at most {self.max_context}")

    @contextmanager
    def _on_own_streams(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(on_device(self._head_device))
            yield

    @contextmanager
    def _entered_from_outside(self) -> Iterator[None]:
        """On the own streams, behind what the caller's streams have queued; they wait for what is queued here."""
        for device, stream in self._streams.items():
            self._entered[device].record(torch.cuda.current_stream(device))
            stream.wait_event(self._entered[device])
        try:
            with self._on_own_streams():
                yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for device, stream in self._streams.items():
            self._left[device].record(stream)
            torch.cuda.current_stream(device).wait_event(self._left[device])

    def _synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))
