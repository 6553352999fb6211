"""Known tokens through an engine: prompts in chunks, logits and log-probabilities at all positions,
traces.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.caches.allocation import chunk_tokens
from dsv4.config import ModelConfig
from dsv4.decode import CUDAGraphDecoder
from dsv4.engine_config import EngineConfig
from dsv4.generation import USED_OTHERWISE, check_watch
from dsv4.layers.values import Watch
from dsv4.limits import MAX_DECODE_TOKENS, MAX_LOGPROBS
from dsv4.logprobs import TokenLogprobs
from dsv4.progress import Progress, check_functions
from dsv4.sequence import EngineSequence
from dsv4.step.chunks import PromptChunks, RunStep, run_chunks, split_ids
from dsv4.step.direct import DirectSteps
from dsv4.step.logit_parts import logits_in_parts
from dsv4.step.nan_search import NaNSearch
from dsv4.step.scored import ScoredSteps
from dsv4.step.steps import RecordedSteps
from dsv4.token_ids import check_integer, check_integers
from dsv4.trace.patterns import EVERY_VALUE, matching
from dsv4.trace.steps import ShownValues, TracedSteps


class EngineInputs(EngineSequence):
    """What an engine does with tokens that it is given."""

    config: ModelConfig
    engine_config: EngineConfig
    steps: DirectSteps | RecordedSteps
    decoder: CUDAGraphDecoder | None
    prompt_chunks: PromptChunks
    _nan: NaNSearch

    def logits(self, token_ids: Sequence[int], chunk_sizes: Sequence[int] | None = None) -> Tensor:
        """Teacher-forced logits of a fresh sequence at all positions, float32 ``[T, V]``.

        ``chunk_sizes``, positive integers that sum to T (else ``ValueError``), says how the tokens
        are fed; a size above ``prefill_chunk`` and 8 is split. The plan does not count the result.
        Raises ``FloatingPointError`` for NaN that the logits do not show.
        """
        ids = self._whole(token_ids)
        most = max(chunk_tokens(self.engine_config), MAX_DECODE_TOKENS)
        if chunk_sizes is None:
            chunks = self.prompt_chunks.cut(ids)
        else:
            chunks = split_ids(ids, check_integers("chunk_sizes", chunk_sizes), most)
        shape = (len(ids), self.config.vocab_size)
        device = self.steps.model.head_device
        logits_TV = torch.empty(shape, dtype=torch.float32, device=device)
        self._start(ids)
        done = 0
        for chunk in chunks:
            for part_TV in logits_in_parts(self.steps, self.steps.run(chunk)):
                logits_TV[done : done + len(part_TV)] = part_TV
                done += len(part_TV)
        return self._nan.checked(logits_TV, ids, shown=True)

    def prompt_logprobs(
        self, token_ids: Sequence[int], count: int, progress: Progress | None = None
    ) -> list[TokenLogprobs]:
        """Of each prompt token but the first: its log-probability and the ``count`` largest, 0 to
        ``MAX_LOGPROBS``. Raises ``FloatingPointError`` for one that is not finite, and
        ``RuntimeError`` when ``progress`` has changed the sequence.
        """
        count = check_integer("count", count, 0, MAX_LOGPROBS)
        check_functions(progress=progress)
        ids = self._whole(token_ids)
        self._start(ids)
        scored = ScoredSteps(self.steps, ids, count)
        self._prefill(ids, progress, scored.run)
        self._nan.checked(scored.logprobs_T[:, None], ids)
        return scored.found

    def trace(
        self,
        token_ids: Sequence[int],
        at: Sequence[str] = EVERY_VALUE,
        prompt_tokens: int | None = None,
    ) -> dict[str, Tensor]:
        """The values of a fresh sequence whose names match the patterns ``at``, on the CPU
        (traces.md#values). Those after ``prompt_tokens`` (None: all) are fed one by one. Raises
        ``UserError`` for a pattern that matches no value of the model.
        """
        found = ShownValues()
        self.run_traced(token_ids, Watch(found.add, matching(self.config, at)), prompt_tokens)
        return found.joined()

    def run_traced(
        self, token_ids: Sequence[int], watch: Watch, prompt_tokens: int | None = None
    ) -> None:
        """``trace`` that shows ``watch`` the rows of a value as each step computes them."""
        ids = self._whole(token_ids)
        check_watch(watch)
        if prompt_tokens is not None:
            check_integer("prompt_tokens", prompt_tokens, 0, len(ids))
        self._start(ids)
        prompt = ids[:prompt_tokens]
        chunks = self.prompt_chunks.cut(prompt)
        TracedSteps(self.steps, watch, self.decoder).feed(chunks, ids[len(prompt) :])

    def _prefill(
        self, token_ids: list[int], progress: Progress | None, run: RunStep | None = None
    ) -> Tensor:
        """Final hidden states of the last chunk, unless ``progress`` has changed the sequence."""
        expected = list(self._token_ids)
        ahead = 2 * len(self.state.devices)
        chunks = self.prompt_chunks.cut(token_ids)
        hidden_TE = run_chunks(run or self.steps.run, chunks, ahead, progress)
        if self.token_ids != expected:
            raise RuntimeError(USED_OTHERWISE)
        return hidden_TE
