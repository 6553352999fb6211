"""Drafters: a draft module run along with the main model, one call for what a step has computed and
one for the drafts behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.layers.classic_mtp import ClassicMTP, Rows
from dsv4.layers.dspark import DSpark
from dsv4.ops import Ops
from dsv4.ops.drafts import DraftOps
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.speculative.module import DraftModule, DraftScope

# The ops of the part of a step that drafts, opened on the module's device.
OpenPart = Callable[[], AbstractContextManager[Ops]]
# The token at a position, int64 scalar, chosen by its logits ``[V]``; ``NAN_TOKEN`` for NaN.
ChooseAt = Callable[[Tensor, int], Tensor]


class Proposal(NamedTuple):
    """Drafts, and for each the float32 logits that it was chosen by, ``[N, V]``."""

    tokens: list[int]
    logits_NV: Tensor


NO_DRAFTS = Proposal([], torch.empty((0, 0), dtype=torch.float32))


class Drafter(Protocol):
    """A draft module that is run along with the main model."""

    @property
    def scope(self) -> DraftScope:
        """What it reads and makes."""
        ...

    def remember(self, token_ids: Sequence[int], taps: Mapping[str, Tensor], start: int) -> None:
        """A main step has appended ``token_ids`` at the position ``start``."""
        ...

    def propose(self, token: int, position: int, count: int, choose: ChooseAt) -> Proposal:
        """Up to ``count`` drafts behind ``token``, which stands at ``position`` and is not appended
        yet. Fewer where a draft's logits have NaN.
        """
        ...


def make_drafter(
    module: DraftModule, drafts: DraftOps, state: DraftState, last_layer: int, open_part: OpenPart
) -> Drafter:
    """The drafter of this module; ``last_layer``: of the main model."""
    scope = DraftScope.of(module, last_layer)
    if isinstance(module, ClassicMTP):
        return ClassicDrafter(module, scope, drafts, state, open_part)
    return DSparkDrafter(module, scope, drafts, state, open_part)


@dataclass(frozen=True)
class ClassicDrafter:
    """``Drafter`` of classic MTP.

    The row of a position needs the token behind it: the last one of a step is run when the next
    step, or a draft, brings that token. What a row was when its token was a draft is overwritten.
    """

    module: ClassicMTP
    scope: DraftScope
    drafts: DraftOps
    state: DraftState
    open_part: OpenPart

    def remember(self, token_ids: Sequence[int], taps: Mapping[str, Tensor], start: int) -> None:
        """See ``Drafter``: the keys of the positions whose next token is known. Nothing reads that
        of a position before those whose streams are known.
        """
        state = self.state
        streams_TME = taps[self.scope.taps[0]].to(state.position_1.device)
        before_TME = torch.cat((state.streams_at(start - 1), streams_TME[:-1]))
        dropped = max(0, len(token_ids) - state.remembered_rows)
        with self.open_part() as ops:
            rows = self._rows(token_ids[dropped:], before_TME[dropped:], start - 1 + dropped)
            self.module.remember(ops, self.drafts, rows, state.stages[0])
        state.keep_streams(streams_TME, start + len(token_ids))

    def propose(self, token: int, position: int, count: int, choose: ChooseAt) -> Proposal:
        """See ``Drafter``: a row for every draft, the first one of the main model's streams."""
        streams_1ME = self.state.streams_at(position - 1)
        tokens: list[int] = []
        logits: list[Tensor] = []
        with self.open_part() as ops:
            rows = self._rows([token], streams_1ME, position - 1)
            while len(tokens) < count:
                streams_1ME, logits_1V = self.module(ops, self.drafts, rows, self.state.stages[0])
                chosen = choose(logits_1V[0], position + 1 + len(tokens))
                if int(chosen) == NAN_TOKEN:
                    break
                tokens.append(int(chosen))
                logits.append(logits_1V)
                rows = rows._replace(tokens_T=chosen[None], streams_TME=streams_1ME)
        return Proposal(tokens, torch.cat(logits)) if tokens else NO_DRAFTS

    def _rows(self, tokens: Sequence[int], streams_TME: Tensor, first: int) -> Rows:
        state = self.state
        state.position_1.fill_(first)
        tokens_T = torch.tensor(tokens, dtype=torch.int64, device=streams_TME.device)
        return Rows(tokens_T, streams_TME, state.position_1, state.rejected_1)


@dataclass(frozen=True)
class DSparkDrafter:
    """``Drafter`` of DSpark. Fewer drafts than the trained block are the first ones of a whole
    block, because every token of a block sees all of it.
    """

    module: DSpark
    scope: DraftScope
    drafts: DraftOps
    state: DraftState
    open_part: OpenPart

    def remember(self, token_ids: Sequence[int], taps: Mapping[str, Tensor], start: int) -> None:
        """See ``Drafter``: the keys of the positions."""
        state = self.state
        device = state.position_1.device
        dropped = max(0, len(token_ids) - state.remembered_rows)
        read = [taps[name][dropped:].to(device) for name in self.scope.taps]
        end = start + len(token_ids)
        positions_T = torch.arange(start + dropped, end, device=device)
        with self.open_part() as ops:
            self.module.remember(ops, self.drafts, read, positions_T, state)

    def propose(self, token: int, position: int, count: int, choose: ChooseAt) -> Proposal:
        """See ``Drafter``: one block, and its drafts one after the other."""
        state = self.state
        keys = self.module.keys
        noise = [keys.noise_token_id] * (keys.block_size - 1)
        device = state.position_1.device
        tokens_B = torch.tensor([token, *noise], dtype=torch.int64, device=device)
        state.position_1.fill_(position)
        chosen: list[Tensor] = []

        def choose_slot(slot: int, logits_V: Tensor) -> Tensor:
            chosen.append(choose(logits_V, position + 1 + slot))
            return chosen[-1].clamp(min=0)[None]

        with self.open_part() as ops:
            block = self.module.block(ops, self.drafts, tokens_B, state)
            first = block._replace(
                collapsed_BE=block.collapsed_BE[:count], logits_BV=block.logits_BV[:count]
            )
            drafts = self.module.draft(self.drafts, first, tokens_B[:1], choose_slot)
        tokens = torch.stack(chosen).tolist()
        good = tokens.index(NAN_TOKEN) if NAN_TOKEN in tokens else len(tokens)
        return Proposal(tokens[:good], drafts.logits_BV[:good])
