"""Steps with drafts, of ops that compute when they are called: draft, verify, accept.

The host drives: it reads every draft and decides which stay. Caches are addressed by position, so
what a rejected draft has written is overwritten, or never read.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.layers.values import UNTRACED, ValueSink
from dsv4.model import Transformer
from dsv4.ops import Ops
from dsv4.ops.acceptance import (
    accepted_drafts,
    accepting_seed,
    behind_accepted,
    drawn,
    probabilities,
    remaining_seed,
)
from dsv4.ops.drafts import TORCH_DRAFTS
from dsv4.ops.row_by_row import row_by_row
from dsv4.ops.sampling import gumbel_noise
from dsv4.run_stats import DraftStats
from dsv4.sampling import Sampler, checked_token
from dsv4.speculative.drafter import NO_DRAFTS, Drafter, Proposal, make_drafter
from dsv4.speculative.module import DraftModule, DraftScope
from dsv4.speculative.rank_drafters import RankDrafters
from dsv4.speculative.tally import AskedDrafts, DraftCount, Tally, Usefulness
from dsv4.speculative.taps import Taps
from dsv4.step.direct import DirectSteps
from dsv4.step.observer import open_part
from dsv4.token_ids import shared_beginning


class DraftedSteps(DirectSteps):
    """``DirectSteps`` whose ``following`` drafts; every step tells the drafter what it computed.

    ``drafted``: how drafts did since the last ``first_token``. ``count``: of the drafts of a step.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        state: DecodeState,
        ops: Ops,
        modules: Sequence[DraftModule],
        drafts: AskedDrafts,
        max_context: int,
    ) -> None:
        """``drafts`` of a step at most: "auto" by what was measured, None as many as the module was
        trained to make. ``modules``: what every rank has of it, whose caches are in the ranks'
        ``state.draft``; ``max_context``: tokens that the caches hold; the others as of
        ``DirectSteps``.

        Raises ``UserError`` for more drafts than the module can make.
        """
        super().__init__(models, state, ops)
        assert state.draft is not None
        self._draft_state = state.draft
        self._modules = tuple(modules)
        self._max_context = max_context
        # NaN among drafts ends the drafts, not the run: these ops do not note it.
        self._draft_ops = ops
        self.drafter = self._whole_drafter()
        scope = self.drafter.scope
        self._taps = Taps(scope.taps, UNTRACED)
        self.count = DraftCount.asked(drafts, scope.most, scope.trained_block)
        self._count = self.count
        # Tokens that are verified together have the bits of tokens that come one by one.
        self._decode_ops = row_by_row(self.ops)
        self.drafted = Tally(scope.most)
        self._usefulness = Usefulness()

    def first_token(self, sampler: Sampler, hidden_TE: Tensor) -> int:
        """See ``DirectSteps``; a new run begins, which has drafted nothing."""
        self.drafted = Tally(self.drafter.scope.most)
        return super().first_token(sampler, hidden_TE)

    def following(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens behind ``token``, several for each step of which drafts stay.

        Raises ``FloatingPointError`` for NaN that is not a draft's.
        """
        self._count = self.count.for_run(sampler.params.temperature == 0)
        start = self.state.position
        given = 0
        # Where an error leaves the sequence: behind the token that met it.
        kept = start
        try:
            while given < steps:
                kept = start + given + 1
                tokens, rows = self._step(token, sampler, steps - given)
                self.state.rollback(start + given + len(tokens))
                for token, logits_V in zip(tokens, rows, strict=True):
                    sampler.note(logits_V, _on(logits_V.device, token))
                    given += 1
                    kept = start + given
                    yield token
        finally:
            self.state.set_position(min(kept, self.state.position))
            self._usefulness.judge(self.drafted.stats())

    def draft_stats(self) -> DraftStats:
        """See ``DirectSteps``."""
        return self.drafted.stats()

    def _computed(self, token_ids: Sequence[int], start: int) -> None:
        self.drafter.remember(token_ids, self._taps.found, start)

    def _tapped(self, values: ValueSink) -> ValueSink:
        self._taps = Taps(self.drafter.scope.taps, values)
        return self._taps

    @torch.inference_mode()
    def _step(self, token: int, sampler: Sampler, most: int) -> tuple[list[int], list[Tensor]]:
        """Appends ``token`` and drafts, and gives at most ``most`` tokens behind it, each with the
        logits that it was chosen by. Rejected drafts are still appended.
        """
        started = time.perf_counter()
        proposal = self._propose(token, sampler)
        drafted = time.perf_counter()
        tokens, rows = self._verified(token, proposal, sampler)
        ended = time.perf_counter()
        accepted = len(tokens) - 1
        count = len(proposal.tokens)
        # The last step of a run may find more than is asked for.
        wanted = tokens[:most]
        self.drafted.add(count, accepted, len(wanted), (drafted - started, ended - drafted))
        self._count.add(count, accepted, ended - started)
        return wanted, rows[:most]

    def _propose(self, token: int, sampler: Sampler) -> Proposal:
        """Drafts behind ``token``: none where the module does not know the sequence yet, or the
        context has no room. As many as ever at the end of a run: its last tokens are those of a
        longer one.
        """
        count = self._count.now
        position = self.state.position
        has_room = position + count < self._max_context
        if not (count and has_room and self._draft_state.covers(position)):
            return NO_DRAFTS
        self._sampler.load(sampler)
        return self.drafter.propose(token, position, count, self._choose_draft)

    def _choose_draft(self, logits_V: Tensor, position: int) -> Tensor:
        """The draft at ``position``, with the noise that the main model's draw would have."""
        return self._sampler.choose(self.ops, logits_V, _on(logits_V.device, position)[None])

    def _verified(
        self, token: int, proposal: Proposal, sampler: Sampler
    ) -> tuple[list[int], list[Tensor]]:
        """The tokens behind ``token``, by a step of it and the drafts."""
        position = self.state.position
        logits_MV = self.decode([token, *proposal.tokens])
        if not proposal.tokens:
            return [self._sampled(sampler, logits_MV[0])], [logits_MV[0]]
        if self.state.met_nan or not bool(logits_MV.amax(1).isfinite().all()):
            # A draft may have brought NaN or infinity: the token alone decides.
            self.state.forget_nan()
            return self._alone(token, position, sampler)
        if sampler.params.temperature == 0:
            tokens = self._greedy(proposal.tokens, logits_MV)
        else:
            tokens = self._accepted(proposal, logits_MV, sampler)
        return tokens, list(logits_MV[: len(tokens)])

    @staticmethod
    def _greedy(drafts: list[int], logits_MV: Tensor) -> list[int]:
        """The drafts that are the largest logits, and the largest one behind them; the lowest id on
        ties.
        """
        best_M1 = logits_MV.amax(1, keepdim=True)
        ids_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        largest = torch.where(logits_MV == best_M1, ids_V, logits_MV.shape[1]).amin(1).tolist()
        return largest[: shared_beginning(drafts, largest) + 1]

    def _accepted(self, proposal: Proposal, logits_MV: Tensor, sampler: Sampler) -> list[int]:
        """The drafts that are kept and the token behind them, for temperatures above 0."""
        (temperature, top_p, min_p, top_k), seed = sampler.settings()
        restricted = (temperature, top_p, min_p, int(top_k))
        first = self.state.position - len(proposal.tokens)
        device = logits_MV.device
        p_1MV = probabilities(logits_MV, *restricted)[None]
        q_1NV = probabilities(proposal.logits_NV.to(device), *restricted)[None]
        noise = partial(_noise_at, device=device)
        gumbel_N = torch.cat(
            [noise(1, accepting_seed(seed), first + n) for n in range(len(proposal.tokens))]
        )
        uniform_1N = torch.exp(-torch.exp(-gumbel_N.double()))[None]
        drafts_1N = _on(device, [proposal.tokens])
        accepted_1 = accepted_drafts(p_1MV[:, :-1], q_1NV, drafts_1N, uniform_1N)
        accepted = int(accepted_1)
        if accepted == len(proposal.tokens):
            behind = self.sample_at(sampler, logits_MV[accepted], first + accepted)
        else:
            rest_1V = behind_accepted(p_1MV, q_1NV, accepted_1)
            noise_V = noise(rest_1V.shape[1], remaining_seed(seed), first + accepted)
            behind = int(drawn(rest_1V, noise_V[None]))
        return [*proposal.tokens[:accepted], behind]

    def sample_at(self, sampler: Sampler, logits_V: Tensor, position: int) -> int:
        """The token at ``position``. Raises ``FloatingPointError`` for NaN."""
        self._sampler.load(sampler)
        return checked_token(int(self._choose_draft(logits_V, position)), position)

    def _alone(self, token: int, position: int, sampler: Sampler) -> tuple[list[int], list[Tensor]]:
        """Appends ``token`` again, at ``position`` and by itself: the token behind it."""
        self.state.rollback(position)
        logits_V = self.decode([token])[0]
        return [self._sampled(sampler, logits_V)], [logits_V]

    def _sampled(self, sampler: Sampler, logits_V: Tensor) -> int:
        token = self.sample_at(sampler, logits_V, self.state.position)
        return checked_token(token, self.state.position, self.state.met_nan)

    def _whole_drafter(self) -> Drafter:
        if len(self._modules) == 1:
            return self._drafter_of(0, self._draft_ops)
        scope = DraftScope.of(self._modules[0], self._last_layer)
        on_ranks = partial(self._on_ranks, ops=self._draft_ops)
        return RankDrafters(scope, self._drafter_of, on_ranks)

    def _drafter_of(self, rank: int, ops: Ops) -> Drafter:
        state = self.state.ranks[rank].draft
        assert state is not None
        device = state.position_1.device

        def open_draft() -> AbstractContextManager[Ops]:
            return open_part(ops, self._observer_of(rank), "draft", device)

        return make_drafter(self._modules[rank], TORCH_DRAFTS, state, self._last_layer, open_draft)

    @property
    def _last_layer(self) -> int:
        return self.model.segments[-1].layers[-1]


def _noise_at(count: int, seed: int, position: int, device: torch.device) -> Tensor:
    return gumbel_noise(count, seed, _on(device, position)[None])


def _on(device: torch.device, value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device=device)
