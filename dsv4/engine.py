"""Engine: load a checkpoint, prefill in chunks, decode, generate, and look inside."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsv4.caches.allocation import COMPUTE_DTYPES, chunk_tokens, prefill_tokens
from dsv4.checkpoint.identity import NO_FOLDER, Identity
from dsv4.checkpoint.packed_cache import PackedCache
from dsv4.checkpoint.state_file import StateKey
from dsv4.config import ModelConfig
from dsv4.decode import CUDAGraphDecoder, Mode, build_decoder
from dsv4.decode.drafted_decoder import DraftedDecoder
from dsv4.engine_config import EngineConfig
from dsv4.engine_inputs import EngineInputs
from dsv4.errors import UserError
from dsv4.generation import Request, Run, check_watch
from dsv4.launch.compiler import compile_ahead
from dsv4.layers.values import Watch
from dsv4.layers.weights import Weights
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.load_check import checked_table
from dsv4.model import build_ranks
from dsv4.opened_checkpoint import OpenedCheckpoint
from dsv4.ops.tables import DirectTable, Table
from dsv4.parallel.devices import table_on, with_device_defaults
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state
from dsv4.parallel.sharding import local_config
from dsv4.plan import MemoryPlan, max_context_tokens
from dsv4.progress import Progress, check_functions
from dsv4.run_stats import RunStats
from dsv4.sampling import Sampler, SamplingParams
from dsv4.speculative.module import DraftModule, allocate_draft, build_draft
from dsv4.speculative.recorded_drafts import record_drafts
from dsv4.speculative.recorded_steps import DraftedRecordedSteps
from dsv4.speculative.steps import DraftedSteps
from dsv4.speculative.tally import drafts_of_a_step
from dsv4.step.chunks import PromptChunks
from dsv4.step.direct import DirectSteps
from dsv4.step.nan_search import NaNSearch
from dsv4.step.steps import RecordedSteps
from dsv4.token_ids import check_room
from dsv4.trace.steps import TracedSteps
from dsv4.weights.parameters import shown_mtp

_LOG = logging.getLogger("dsv4")


class Engine(EngineInputs):
    """One model and the state of one sequence. Not thread safe.

    Every call that changes the sequence ends a ``generate`` that is under way. Steps compute in
    inference mode; what the engine returns is copied outside it, so that callers may change it.
    Ids outside the vocabulary, none, and more than ``max_context`` holds raise ``UserError`` and
    leave the sequence as it was.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        weights: Weights | Sequence[Weights],
        placement: Placement,
        table: Table | None = None,
        compiling: Progress | None = None,
        identity: Identity = NO_FOLDER,
    ) -> None:
        """``weights`` by canonical name (``dsv4.weights.parameters``), each on
        ``placement.device_of(name)``; or what every rank holds of them
        (``dsv4.parallel.sharding``), in the order of the ranks.

        ``table`` None: the op table of ``engine_config``. One with native kernels is compared with
        its portable one on these weights (``dsv4.load_check``). Names under ``mtp.`` are a draft
        module's. The engine reads every weight once, so ``weights`` may be a ``ReadOnce``.
        ``compiling(done, total)`` is told about kernels that have to be compiled.
        ``identity``: what saved states call the weights.
        """
        self.config = config
        alone = placement.ranks == 1
        self.devices = placement.layer_devices if alone else placement.stages[0].devices
        # Chunks of a length that somebody asks for have that length.
        in_turn = 1 if engine_config.prefill_chunk else len(placement.of_rank(0).devices)
        engine_config = with_device_defaults(engine_config, self.devices)
        self.engine_config = engine_config
        self.prompt_chunks = PromptChunks(chunk_tokens(engine_config), in_turn)
        max_context = max_context_tokens(config, engine_config)
        ranks = [weights] if isinstance(weights, Mapping) else weights
        shown = shown_mtp(ranks[0])
        table = table or table_on(engine_config, self.devices)
        dtype = COMPUTE_DTYPES[engine_config.compute_dtype]
        self.models = build_ranks(config, ranks, table.packing, placement, dtype)
        self.model = self.models[0]
        self.table = checked_table(table, self.model, engine_config)
        self.draft_modules: list[DraftModule] = []
        if shown is not None:
            local = local_config(config, placement.cuts)
            pairs = zip(ranks, self.models, strict=True)
            self.draft_modules = [build_draft(local, own, table, shown, of) for own, of in pairs]
        # Packing leaves free blocks in torch's cache: the device gets them back.
        torch.cuda.empty_cache()
        state = allocate_state(config, engine_config, max_context, placement)
        if shown is not None:
            for model, own in zip(self.models, state.ranks, strict=True):
                device = model.head_device
                own.draft = allocate_draft(config, engine_config, shown, device, identity.draft)
        super().__init__(state, StateKey.of(config, engine_config, identity.main), max_context)
        self.steps = self._build_steps(compiling)
        self.decoder = self._build_decoder()
        self.last_run: RunStats | None = None
        self._nan = NaNSearch(self.steps, self.prompt_chunks)

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        change_table: Callable[[Table], Table] | None = None,
        compiling: Progress | None = None,
        packing: Progress | None = None,
        keeping: Progress | None = None,
    ) -> "Engine":
        """Loads a checkpoint folder (model.md#checkpoints). ``progress(done_bytes, total_bytes)``
        is called on the way, before that ``compiling(done, total)`` as kernels are compiled, after
        it ``packing(done_bytes, total_bytes)`` as weights are put into the op table's layout, and
        ``keeping(done_bytes, total_bytes)`` as packed ones are written to disk.

        ``change_table`` replaces the op table that ``config`` chooses, e.g. to swap ops. Raises
        ``UserError`` before any weight is read: for a bad folder, when the memory plan does not
        fit, and for a GPU or an installation without the ops that are asked for.
        """
        check_functions(progress=progress, compiling=compiling, packing=packing, keeping=keeping)
        engine_config = EngineConfig.given(config)
        opened = OpenedCheckpoint.open(path, engine_config)
        opened.plan.refuse_if_too_large()
        if engine_config.parallel == "pipeline" and len(opened.placement.devices) > 1:
            _LOG.info("--parallel tensor decodes one sequence faster, where the model can be cut")
        if opened.steps is not None:
            compile_ahead(opened.steps.kernels(), compiling)
        table = opened.changed_table(change_table)
        identity = opened.identity()
        placement = opened.placement
        cache = None
        if engine_config.packed_cache is not None:
            folder = Path(engine_config.packed_cache)
            name = table.packing.name
            ranks = placement.ranks
            cache = PackedCache(folder, opened.checkpoint, identity.main, name, ranks, keeping)
        with opened.reading(progress, packing, cache) as weights:
            return cls(opened.config, engine_config, weights, placement, table, compiling, identity)

    @staticmethod
    def plan(
        path: str | Path, config: EngineConfig | None = None, gpu_memory: int | None = None
    ) -> MemoryPlan:
        """The memory plan of ``load`` with the same arguments, from the headers alone, also where
        it does not fit; with ``gpu_memory`` that of GPUs with this many bytes each, which need not
        be there. Raises ``UserError``.
        """
        return OpenedCheckpoint.open(path, EngineConfig.given(config), gpu_memory).plan

    def prefill(self, token_ids: Sequence[int], progress: Progress | None = None) -> Tensor:
        """Appends a prompt in chunks of ``prefill_chunk``; returns the last token's logits, float32
        ``[V]``. ``progress(done_tokens, total_tokens)`` is told about every chunk. NaN or +∞ raises
        ``FloatingPointError``; the engine then stands at a new, empty sequence. Raises
        ``RuntimeError`` when ``progress`` has changed the sequence.
        """
        token_ids = self._ids(token_ids)
        check_functions(progress=progress)
        self._end_run()
        before = self.position
        check_room(before + len(token_ids), self.max_context)
        self.state.forget_nan()
        self._token_ids[before:] = token_ids
        hidden_TE = self._prefill(token_ids, progress)
        logits_V = self.steps.logits(hidden_TE[-1:])[0].clone()
        return self._nan.checked(logits_V, token_ids, before)

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Appends 1 to 8 tokens in one step; returns float32 ``[T, V]``, row t the logits after
        token t. More raise ``ValueError``. NaN is not looked for.

        With ``cuda_graph`` a step of as many tokens as were captured (1, and with drafts those that
        verify) replays; others run eagerly.
        """
        token_ids = self._ids(token_ids)
        if len(token_ids) > MAX_DECODE_TOKENS:
            expected = f"1 to {MAX_DECODE_TOKENS}"
            raise ValueError(f"token_ids: found {len(token_ids)} tokens, expected {expected}")
        self._end_run()
        check_room(self.position + len(token_ids), self.max_context)
        self._token_ids[self.position :] = token_ids
        if self.decoder is not None and len(token_ids) in self.decoder.lengths:
            return self.decoder.replay(token_ids, self.position).clone()
        return self.steps.decode(token_ids).clone()

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams | Sampler | None = None,
        stop_token_ids: Iterable[int] | None = None,
        prefill_progress: Progress | None = None,
        watch: Watch | None = None,
        reuse: bool = False,
    ) -> Generator[int, None, None]:
        """Yields sampled ids of a fresh sequence up to a stop token, which is not yielded, the
        limit or the context's end. The prompt is read when the first one is asked for.

        ``sampling`` None is ``SamplingParams()``, ``stop_token_ids`` None the model's EOS ids. A
        ``Sampler`` shows what is ``noted`` of a token as it comes, and nothing of an earlier call.
        ``watch`` is shown the values of every step. ``reuse``: what the current sequence has in
        common with ``token_ids`` is not computed again (``reusable_tokens``), and a later call can
        come back to this one's prompt from behind any answer. ``last_run`` holds the statistics
        once the iterator ends or is closed. Raises ``UserError`` for wrong arguments,
        ``FloatingPointError`` for NaN, ``RuntimeError`` when another call changed the sequence.
        """
        prompt = self._whole(token_ids)
        check_watch(watch)
        request = Request.checked(
            self.config, prompt, max_new_tokens, sampling, stop_token_ids, prefill_progress
        )
        if reuse:
            self._end_run()
        else:
            self.reset()
        return self._nan.watched(prompt, self._generate(request, watch, reuse))

    def _generate(
        self, request: Request, watch: Watch | None, reuse: bool
    ) -> Generator[int, None, None]:
        # Here, because the engine may have been used since this generator was made.
        reused = self._begin(request.token_ids, reuse)
        request.sampler.noted = []
        started = time.perf_counter()
        traced = None if watch is None else TracedSteps(self.steps, watch, self.decoder)
        unread = request.token_ids[reused:]
        hidden_TE = self._prefill(unread, request.progress, traced and traced.run)
        first = self.steps.first_token(request.sampler, hidden_TE)
        seconds = time.perf_counter() - started
        if reuse:
            self.state.keep_point()
        steps = request.most_steps(self.max_context)
        if traced is None:
            following = self.following(first, request.sampler, steps, self.decoder)
        else:
            following = traced.following(first, request.sampler, steps)
        run = Run(request, seconds, first, following, reused)
        self._run = run
        try:
            for token in run.tokens():
                self._token_ids.append(token)
                yield token
        finally:
            if self._run is run:
                self._end_run()
                self.last_run = run.stats(self.position, self.steps.draft_stats())

    def following(
        self, token: int, sampler: Sampler, steps: int, decoder: CUDAGraphDecoder | None
    ) -> Generator[int, None, None]:
        """Yields the tokens after ``token``, one step each: replayed by ``decoder``, or eagerly.
        Raises ``FloatingPointError`` for NaN.
        """
        follow = self.steps.following if decoder is None else decoder.generate
        yield from follow(token, sampler, steps)

    def _build_steps(self, compiling: Progress | None) -> DirectSteps | RecordedSteps:
        modules = self.draft_modules
        count = drafts_of_a_step(self.engine_config)
        if isinstance(self.table, DirectTable):
            ops = self.table.ops
            if not modules:
                return DirectSteps(self.models, self.state, ops)
            return DraftedSteps(self.models, self.state, ops, modules, count, self.max_context)
        tokens = prefill_tokens(self.engine_config, self.max_context)
        if not modules:
            return RecordedSteps(self.models, self.state, self.table, tokens, compiling)
        alongs = record_drafts(self.config, modules, self.models, self.state, self.table)
        return DraftedRecordedSteps(self.models, alongs, tokens, count, self.max_context, compiling)

    def _build_decoder(self) -> CUDAGraphDecoder | None:
        steps = self.steps
        mode = self.engine_config.cuda_graph
        if mode is None:
            return None
        if not isinstance(steps, RecordedSteps):
            raise UserError("EngineConfig.cuda_graph: found the torch ops, expected 'cuda'")

        def make(mode: Mode) -> CUDAGraphDecoder:
            if isinstance(steps, DraftedRecordedSteps):
                return DraftedDecoder(steps, mode, self.max_context)
            return CUDAGraphDecoder(steps, mode, self.max_context)

        return build_decoder(mode, steps, self.max_context, make)
