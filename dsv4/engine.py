"""Engine: load a checkpoint, prefill in chunks, decode, generate, and look inside."""

import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dsv4.caches.state import COMPUTE_DTYPES, DecodeState, chunk_tokens, prefill_tokens
from dsv4.checkpoint import Checkpoint, describe, load_weights, mtp_kind, open_checkpoint
from dsv4.config import ModelConfig
from dsv4.decode import CUDAGraphDecoder, build_decoder
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError, shorten
from dsv4.launch.compiler import compile_ahead
from dsv4.launch.target import Target
from dsv4.layers.weights import ReadOnce, Weights
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.model import Transformer
from dsv4.ops.tables import DirectTable, Table
from dsv4.parallel.devices import check_cuda_graph, engine_devices, table_on, with_device_defaults
from dsv4.parallel.placement import Placement, bytes_by_layer
from dsv4.plan import MemoryPlan, max_context_tokens, plan_memory
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.direct import DirectSteps
from dsv4.step.planned import PlannedSteps, StoredFormats
from dsv4.step.steps import RecordedSteps
from dsv4.weights.parameters import MtpKind

FinishReason = Literal["stop", "length", "context"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RunStats:
    """What the last ``generate`` did. Decode time excludes the prefill that gave the first token."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    finish_reason: FinishReason


class Engine:
    """One model and the state of one sequence. Not thread safe."""

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        weights: Weights,
        placement: Placement,
        table: Table | None = None,
        compiling: Progress | None = None,
    ) -> None:
        """``weights`` by canonical name (``dsv4.weights.parameters``), each on
        ``placement.device_of(name)``.

        ``table`` None: the op table of ``engine_config``. Names under ``mtp.`` are kept, as stored,
        in ``mtp_weights``. The engine reads every weight once, so ``weights`` may be a
        ``ReadOnce``. ``compiling(done, total)`` is told about kernels that have to be compiled.
        """
        self.config = config
        self.devices = placement.layer_devices
        engine_config = with_device_defaults(engine_config, self.devices)
        self.engine_config = engine_config
        self.max_context = max_context_tokens(config, engine_config)
        self.mtp_weights = {
            name: weights[name] for name in list(weights) if name.startswith("mtp.")
        }
        self.table = table or table_on(engine_config, self.devices)
        dtype = COMPUTE_DTYPES[engine_config.compute_dtype]
        self.model = Transformer.build(config, weights, self.table.packing, self.devices, dtype)
        # What packing leaves in torch's cache goes back to the device, so that everything else
        # finds room.
        torch.cuda.empty_cache()
        self.state = DecodeState.allocate(config, engine_config, self.max_context, self.devices)
        self.steps = self._build_steps(compiling)
        self.decoder: CUDAGraphDecoder | None = None
        if engine_config.cuda_graph is not None:
            if not isinstance(self.steps, RecordedSteps):
                raise UserError("EngineConfig.cuda_graph: found the torch ops, expected 'cuda'")
            self.decoder = build_decoder(engine_config.cuda_graph, self.steps, self.max_context)
        self.last_run: RunStats | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        change_table: Callable[[Table], Table] | None = None,
        compiling: Progress | None = None,
    ) -> "Engine":
        """Loads a checkpoint folder (model.md#checkpoints). ``progress(done_bytes, total_bytes)``
        is called on the way, before that ``compiling(done, total)`` as kernels are compiled.

        ``change_table`` makes the op table that is used of the one that ``config`` chooses: to swap
        ops.

        Raises ``UserError`` before any weight is read: for a bad folder, when the memory plan does
        not fit, and for a GPU or an installation without the ops that are asked for.
        """
        engine_config = config or EngineConfig()
        opened = _Opened.open(path, engine_config)
        opened.plan.refuse_if_too_large()
        if opened.steps is not None:
            _compile(opened.steps, compiling)
        weights = load_weights(
            opened.checkpoint,
            opened.config,
            device_of=opened.placement.device_of,
            mtp=opened.mtp,
            progress=progress,
        )
        table = opened.table if change_table is None else change_table(opened.table)
        return cls(
            opened.config, engine_config, ReadOnce(weights), opened.placement, table, compiling
        )

    @staticmethod
    def plan(path: str | Path, config: EngineConfig | None = None) -> MemoryPlan:
        """The memory plan of ``load`` with the same arguments, from the checkpoint's headers alone."""
        return _Opened.open(path, config or EngineConfig()).plan

    @property
    def position(self) -> int:
        """Tokens of the current sequence so far."""
        return self.state.position

    def reset(self) -> None:
        """Starts a new sequence: nothing of the previous one is visible to it."""
        self.state.set_position(0)

    def rewind(self, tokens: int) -> None:
        """Takes back the last ``tokens`` tokens, e.g. rejected draft tokens: at most 8 behind the
        furthest position that this sequence has reached, because the rings remember no more.
        """
        limit = self.state.undoable_tokens
        if not 0 <= tokens <= limit:
            raise ValueError(f"tokens: found {tokens}, expected 0 to {limit}")
        self.state.set_position(self.position - tokens)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], progress: Progress | None = None) -> Tensor:
        """Appends a prompt in chunks of ``prefill_chunk``; returns the last token's logits, float32
        ``[V]``.
        """
        token_ids = self._checked(token_ids)
        hidden_TE = self._prefill(token_ids, progress)
        return self.steps.logits(hidden_TE[-1:])[0].clone()

    def _prefill(self, token_ids: list[int], progress: Progress | None) -> Tensor:
        """Final hidden states of the last chunk."""
        hidden_TE = self.model.embed.table_VE.new_empty(0)
        done = 0
        # The host runs ahead, so that every device has a chunk to work on, but not so far that
        # progress means nothing.
        in_flight: deque[torch.cuda.Event] = deque()
        for chunk in self._chunks(token_ids, None):
            hidden_TE = self.steps.run(chunk)
            if hidden_TE.is_cuda:
                in_flight.append(torch.cuda.Event())
                in_flight[-1].record(torch.cuda.current_stream(hidden_TE.device))
            if len(in_flight) > 2 * len(self.state.devices):
                in_flight.popleft().synchronize()
            done += len(chunk)
            if progress is not None:
                progress(done, len(token_ids))
        return hidden_TE

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Appends 1 to 8 tokens in one step; returns float32 ``[T, V]``, row t the logits after
        token t.

        With ``cuda_graph`` a step of as many tokens as were captured (1) replays; others run
        eagerly.
        """
        token_ids = self._checked(token_ids)
        if len(token_ids) > MAX_DECODE_TOKENS:
            raise ValueError(
                f"token_ids: found {len(token_ids)} tokens, expected 1 to {MAX_DECODE_TOKENS}"
            )
        if self.decoder is not None and len(token_ids) in self.decoder.lengths:
            return self.decoder.replay(token_ids, self.position).clone()
        return self.steps.decode(token_ids).clone()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], chunk_sizes: Sequence[int] | None = None) -> Tensor:
        """Teacher-forced logits of a fresh sequence at all positions, float32 ``[T, V]``.

        ``chunk_sizes`` (summing to T) says how the tokens are fed; a size above ``prefill_chunk``
        and 8 is split.
        """
        self.reset()
        chunks = self._chunks(token_ids, chunk_sizes)
        return torch.cat([self.steps.logits(self.steps.run(chunk)).clone() for chunk in chunks])

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int]) -> dict[str, Tensor | list[Tensor]]:
        """What passes through the model on a fresh sequence, for layer-by-layer comparison.

        ``layers``: the streams ``[T, M, E]`` after each block; ``final``: the normalised hidden
        state ``[T, E]`` the head reads; ``logits``: float32 ``[T, V]``. All on the CPU, in the
        dtype they had.
        """
        self.reset()
        layers: dict[str, list[Tensor]] = {}
        final = []
        logits = []

        def seen(name: str, value: Tensor) -> None:
            layers.setdefault(name, []).append(value)

        for chunk in self._chunks(token_ids, None):
            hidden_TE = self.steps.trace(chunk, seen)
            final.append(hidden_TE.cpu())
            logits.append(self.steps.logits(hidden_TE).cpu())
        return {
            "layers": [torch.cat(values) for values in layers.values()],
            "final": torch.cat(final),
            "logits": torch.cat(logits),
        }

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_token_ids: Iterable[int] | None = None,
        prefill_progress: Progress | None = None,
    ) -> Generator[int, None, None]:
        """Yields sampled ids of a fresh sequence until a stop token (not yielded), the limit or the
        context's end.

        ``stop_token_ids`` defaults to the model's EOS ids. ``last_run`` holds the statistics once
        the iterator ends, also when the caller closes it early. Raises ``UserError`` for a prompt
        that does not fit and ``FloatingPointError`` when a logit is NaN.
        """
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UserError(
                f"max_new_tokens: found {max_new_tokens!r}, expected an integer of at least 1"
            )
        stops = frozenset(self.config.eos_token_ids if stop_token_ids is None else stop_token_ids)
        sampler = Sampler(sampling or SamplingParams())
        self.reset()
        return self._generate(
            self._checked(token_ids), max_new_tokens, sampler, stops, prefill_progress
        )

    def _generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        sampler: Sampler,
        stops: frozenset[int],
        prefill_progress: Progress | None,
    ) -> Generator[int, None, None]:
        # The caller may have used the engine between making this generator and asking it for the
        # first token.
        self.reset()
        started = time.perf_counter()
        with torch.inference_mode():
            hidden_TE = self._prefill(list(token_ids), prefill_progress)
            first = self.steps.first_token(sampler, hidden_TE)
        prefilled = time.perf_counter()
        steps = min(max_new_tokens - 1, self.max_context - len(token_ids))
        reason: FinishReason = "length" if steps == max_new_tokens - 1 else "context"
        try:
            with closing(self.following(first, sampler, steps, self.decoder)) as following:
                for token in chain((first,), following):
                    if token in stops:
                        reason = "stop"
                        break
                    yield token
        finally:
            seconds = time.perf_counter() - prefilled
            steps = self.position - len(token_ids)
            self.last_run = RunStats(len(token_ids), prefilled - started, steps, seconds, reason)

    def following(
        self, token: int, sampler: Sampler, steps: int, decoder: CUDAGraphDecoder | None
    ) -> Generator[int, None, None]:
        """Yields the tokens after ``token``, one step each: replayed by ``decoder``, or run eagerly
        without one.

        Raises ``FloatingPointError`` when a logit is NaN.
        """
        follow = self.steps.following if decoder is None else decoder.generate
        yield from follow(token, sampler, steps)

    def _build_steps(self, compiling: Progress | None) -> DirectSteps | RecordedSteps:
        if isinstance(self.table, DirectTable):
            return DirectSteps(self.model, self.state, self.table.ops)
        tokens = prefill_tokens(self.engine_config, self.max_context)
        return RecordedSteps(self.model, self.state, self.table, tokens, compiling)

    def _chunks(
        self, token_ids: Sequence[int], chunk_sizes: Sequence[int] | None
    ) -> list[Sequence[int]]:
        token_ids = self._checked(token_ids)
        count = len(token_ids)
        largest = chunk_tokens(self.engine_config)
        sizes = [count]
        if chunk_sizes is not None:
            sizes = list(chunk_sizes)
            largest = max(largest, MAX_DECODE_TOKENS)
        if sum(sizes) != count or any(size < 1 for size in sizes):
            raise ValueError(
                f"chunk_sizes: found {sizes}, expected positive sizes that sum to {count}"
            )
        chunks = []
        start = 0
        for size in sizes:
            part = token_ids[start : start + size]
            chunks += [part[first : first + largest] for first in range(0, size, largest)]
            start += size
        return chunks

    def _checked(self, token_ids: Iterable[int]) -> list[int]:
        """The ids as a list, if they are ids of this model and fit behind the current position."""
        try:
            checked = [operator.index(token) for token in token_ids]
        except TypeError:
            raise UserError(f"token_ids: found {shorten(token_ids)}, expected integers") from None
        if not checked:
            raise UserError("token_ids: found none, expected at least 1")
        for token in checked:
            if not 0 <= token < self.config.vocab_size:
                raise UserError(
                    f"token_ids: found {token}, expected ids from 0 to {self.config.vocab_size - 1}"
                )
        total = self.position + len(checked)
        if total > self.max_context:
            raise UserError(
                f"EngineConfig.max_context: found a sequence of {total} tokens, expected at most {self.max_context}"
            )
        return checked


def _compile(steps: PlannedSteps, compiling: Progress | None) -> None:
    """Compiles the kernels of ``steps`` that no earlier process has compiled."""
    compile_ahead(steps.kernels(), compiling)


@dataclass(frozen=True)
class _Opened:
    """A checkpoint looked at, headers only: what is in it, where it goes and whether it fits.

    ``steps``: what the CUDA ops will do; None with the torch ops.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    mtp: MtpKind | None
    placement: Placement
    table: Table
    steps: PlannedSteps | None
    plan: MemoryPlan

    @classmethod
    def open(cls, path: str | Path, engine: EngineConfig) -> "_Opened":
        checkpoint = open_checkpoint(path)
        config = ModelConfig.from_dict(
            checkpoint.raw_config, str(checkpoint.folder / "config.json")
        )
        mtp = mtp_kind(checkpoint) if engine.load_mtp else None
        stored = describe(checkpoint, config, mtp)
        sizes = ((description.parameter.name, description.nbytes) for description in stored)
        layer_bytes = bytes_by_layer(sizes, config.num_hidden_layers)
        placement = Placement.of(engine, engine_devices(engine), layer_bytes)
        devices = placement.layer_devices
        engine = with_device_defaults(engine, devices)
        check_cuda_graph(engine, devices)
        table = table_on(engine, devices)
        steps = plan_steps(config, engine, [(p, format) for p, format, _ in stored], table, devices)
        plan = plan_memory(config, engine, placement, stored, steps)
        return cls(checkpoint, config, mtp, placement, table, steps, plan)


def plan_steps(
    config: ModelConfig,
    engine: EngineConfig,
    stored: StoredFormats,
    table: Table,
    devices: tuple[torch.device, ...],
) -> PlannedSteps | None:
    """The steps of a recorded table on the GPUs of this machine, without memory; None for the torch
    ops.
    """
    if isinstance(table, DirectTable):
        return None
    targets = {device: Target.of(device) for device in dict.fromkeys(devices)}
    context = max_context_tokens(config, engine)
    return PlannedSteps.of(config, engine, stored, table, targets, devices, context)
