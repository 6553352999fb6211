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

from dsv4.checkpoint import Checkpoint, describe, load_weights, mtp_kind, open_checkpoint
from dsv4.config import MAX_DECODE_TOKENS, EngineConfig, ModelConfig
from dsv4.decode import CUDAGraphDecoder, build_decoder, check_cuda_graph
from dsv4.errors import UserError, shorten
from dsv4.layers.weights import ReadOnce, Weights
from dsv4.model import Transformer, on_device
from dsv4.ops import Ops, op_table
from dsv4.parameters import MtpKind
from dsv4.placement import Placement, bytes_by_layer, check_architectures, table_name
from dsv4.plan import MemoryPlan, max_context_tokens, plan_memory
from dsv4.sampling import Sampler, SamplingParams, checked_token
from dsv4.state import COMPUTE_DTYPES, DecodeState

FinishReason = Literal["stop", "length", "context"]


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
        ops: Ops | None = None,
    ) -> None:
        """``weights`` by canonical name (``dsv4.parameters``), each on ``placement.device_of(name)``.

        ``ops`` None: the table of ``engine_config``. Names under ``mtp.`` are kept, as stored, in ``mtp_weights``. The
        engine reads every weight once, so ``weights`` may be a ``ReadOnce``.
        """
        self.config = config
        self.engine_config = engine_config
        self.max_context = max_context_tokens(config, engine_config)
        self.mtp_weights = {name: weights[name] for name in list(weights) if name.startswith("mtp.")}
        self.devices = placement.layer_devices
        self.ops = ops or _op_table(engine_config, self.devices)
        compute_dtype = COMPUTE_DTYPES[engine_config.compute_dtype]
        self.model = Transformer.build(config, weights, self.ops, self.devices, compute_dtype)
        self.state = DecodeState.allocate(config, engine_config, self.max_context, self.devices)
        self.decoder = build_decoder(engine_config, self.model, self.state, self.ops, self.max_context)
        self.last_run: RunStats | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
        wrap_ops: Callable[[Ops], Ops] | None = None,
    ) -> "Engine":
        """Loads a checkpoint folder (spec §7). ``progress(done_bytes, total_bytes)`` is called as tensors arrive.

        ``wrap_ops`` makes the op table that is used of the one that ``config`` chooses: to time or swap ops.

        Raises ``UserError`` before any weight is read: for a bad folder, when the memory plan does not fit, and for a
        GPU or an installation without the ops that are asked for.
        """
        engine_config = config or EngineConfig()
        opened = _Opened.open(path, engine_config)
        table = _op_table(engine_config, opened.placement.layer_devices)
        opened.plan.refuse_if_too_large()
        weights = load_weights(
            opened.checkpoint,
            opened.config,
            device_of=opened.placement.device_of,
            mtp=opened.mtp,
            progress=progress,
        )
        ops = table if wrap_ops is None else wrap_ops(table)
        return cls(opened.config, engine_config, ReadOnce(weights), opened.placement, ops)

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
        """Takes back the last ``tokens`` tokens, e.g. rejected draft tokens: at most 8 behind the furthest position
        that this sequence has reached, because the rings remember no more.
        """
        limit = self.state.undoable_tokens
        if not 0 <= tokens <= limit:
            raise ValueError(f"tokens: found {tokens}, expected 0 to {limit}")
        self.state.set_position(self.position - tokens)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Tensor:
        """Appends a prompt in chunks of ``prefill_chunk``; returns the last token's logits, float32 ``[V]``."""
        token_ids = self._checked(token_ids)
        # The host runs ahead, so that every device has a chunk to work on, but not so far that progress means nothing.
        in_flight: deque[torch.cuda.Event] = deque()
        hidden_TE, done = self.model.embed.table_VE.new_empty(0), 0
        for chunk in self._chunks(token_ids, None):
            hidden_TE = self._forward(chunk)
            if hidden_TE.is_cuda:
                in_flight.append(torch.cuda.Event())
                in_flight[-1].record(torch.cuda.current_stream(hidden_TE.device))
            if len(in_flight) > 2 * len(self.state.devices):
                in_flight.popleft().synchronize()
            done += len(chunk)
            if progress is not None:
                progress(done, len(token_ids))
        return self.model.logits(hidden_TE[-1:])[0]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Appends 1 to 8 tokens in one step; returns float32 ``[T, V]``, row t the logits after token t.

        With ``cuda_graph`` a step of as many tokens as were captured (1) replays; others run eagerly.
        """
        token_ids = self._checked(token_ids)
        if len(token_ids) > MAX_DECODE_TOKENS:
            raise ValueError(f"token_ids: found {len(token_ids)} tokens, expected 1 to {MAX_DECODE_TOKENS}")
        if self.decoder is not None and len(token_ids) == self.decoder.tokens:
            return self.decoder.replay(token_ids, self.position).clone()
        return self.model.logits(self._forward(token_ids))

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], chunk_sizes: Sequence[int] | None = None) -> Tensor:
        """Teacher-forced logits of a fresh sequence at all positions, float32 ``[T, V]``.

        ``chunk_sizes`` (summing to T) says how the tokens are fed; a size above ``prefill_chunk`` and 8 is split.
        """
        self.reset()
        chunks = self._chunks(token_ids, chunk_sizes)
        return torch.cat([self.model.logits(self._forward(chunk)) for chunk in chunks])

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int]) -> dict[str, Tensor | list[Tensor]]:
        """What passes through the model on a fresh sequence, for layer-by-layer comparison.

        ``layers``: the streams ``[T, M, E]`` after each block; ``final``: the normalised hidden state ``[T, E]`` the
        head reads; ``logits``: float32 ``[T, V]``. All on the CPU, in the dtype they had.
        """
        self.reset()
        layers: list[list[Tensor]] = [[] for _ in self.model.blocks]
        final = []
        for chunk in self._chunks(token_ids, None):
            seen: list[Tensor] = []
            final.append(self._forward(chunk, lambda streams, seen=seen: seen.append(streams.cpu())))
            for collected, streams in zip(layers, seen, strict=True):
                collected.append(streams)
        hidden_TE = torch.cat(final)
        return {
            "layers": [torch.cat(collected) for collected in layers],
            "final": hidden_TE.cpu(),
            "logits": self.model.logits(hidden_TE).cpu(),
        }

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_token_ids: Iterable[int] | None = None,
        prefill_progress: Callable[[int, int], None] | None = None,
    ) -> Generator[int, None, None]:
        """Yields sampled ids of a fresh sequence until a stop token (not yielded), the limit or the context's end.

        ``stop_token_ids`` defaults to the model's EOS ids. ``last_run`` holds the statistics once the iterator ends,
        also when the caller closes it early. Raises ``UserError`` for a prompt that does not fit and
        ``FloatingPointError`` when a logit is NaN.
        """
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens: found {max_new_tokens!r}, expected an integer of at least 1")
        stops = frozenset(self.config.eos_token_ids if stop_token_ids is None else stop_token_ids)
        sampler = Sampler(sampling or SamplingParams(), self.ops)
        self.reset()
        return self._generate(self._checked(token_ids), max_new_tokens, sampler, stops, prefill_progress)

    def _generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        sampler: Sampler,
        stops: frozenset[int],
        prefill_progress: Callable[[int, int], None] | None,
    ) -> Generator[int, None, None]:
        # The caller may have used the engine between making this generator and asking it for the first token.
        self.reset()
        started = time.perf_counter()
        first = self._sample(sampler, self.prefill(token_ids, prefill_progress))
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
        """Yields the tokens after ``token``, one step each: replayed by ``decoder``, or by ``decode`` without one.

        Raises ``FloatingPointError`` when a logit is NaN.
        """
        if decoder is not None:
            yield from decoder.generate(token, sampler, steps)
            return
        for _ in range(steps):
            token = self._sample(sampler, self.decode([token])[0])
            yield token

    def _sample(self, sampler: Sampler, logits_V: Tensor) -> int:
        with torch.inference_mode(), on_device(self.devices[-1]):
            token = int(sampler(logits_V, self.state.positions_1[self.devices[-1]]))
        return checked_token(token, self.position)

    def _forward(self, token_ids: Sequence[int], on_block: Callable[[Tensor], None] | None = None) -> Tensor:
        self.state.advance(len(token_ids))
        return self.model(self.state.token_input(token_ids), self.state, on_block)

    def _chunks(self, token_ids: Sequence[int], chunk_sizes: Sequence[int] | None) -> list[Sequence[int]]:
        token_ids = self._checked(token_ids)
        count, largest = len(token_ids), self.engine_config.prefill_chunk
        sizes = [count]
        if chunk_sizes is not None:
            sizes, largest = list(chunk_sizes), max(largest, MAX_DECODE_TOKENS)
        if sum(sizes) != count or any(size < 1 for size in sizes):
            raise ValueError(f"chunk_sizes: found {sizes}, expected positive sizes that sum to {count}")
        chunks, start = [], 0
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
                raise UserError(f"token_ids: found {token}, expected ids from 0 to {self.config.vocab_size - 1}")
        total = self.position + len(checked)
        if total > self.max_context:
            raise UserError(f"--max-context: found a sequence of {total} tokens, expected at most {self.max_context}")
        return checked


def _op_table(engine: EngineConfig, devices: Sequence[torch.device]) -> Ops:
    """The op table that ``engine`` asks for. Raises ``UserError`` for a GPU that its kernels are not compiled for."""
    name = table_name(engine, devices)
    table = op_table(name)
    if name != "torch":
        check_architectures(devices)
    return table


@dataclass(frozen=True)
class _Opened:
    """A checkpoint looked at, headers only: what is in it, where it goes and whether it fits."""

    checkpoint: Checkpoint
    config: ModelConfig
    mtp: MtpKind | None
    placement: Placement
    plan: MemoryPlan

    @classmethod
    def open(cls, path: str | Path, engine: EngineConfig) -> "_Opened":
        checkpoint = open_checkpoint(path)
        config = ModelConfig.from_dict(checkpoint.raw_config, str(checkpoint.folder / "config.json"))
        mtp = mtp_kind(checkpoint) if engine.load_mtp else None
        stored = describe(checkpoint, config, mtp)
        sizes = ((description.parameter.name, description.nbytes) for description in stored)
        placement = Placement.of(engine, bytes_by_layer(sizes, config.num_hidden_layers))
        check_cuda_graph(engine, placement.layer_devices, table_name(engine, placement.layer_devices))
        return cls(checkpoint, config, mtp, placement, plan_memory(config, engine, placement, stored))
