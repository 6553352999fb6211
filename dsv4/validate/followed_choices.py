"""Torch ops that follow somebody's choices, so that a near tie does not end a comparison: behind
another expert, or another entry, nothing can be compared.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.ops import TORCH, Ops
from dsv4.ops.indexer import index_select
from dsv4.ops.moe import ExpertWeights, Mixture, moe
from dsv4.ops.router import Router, route

EXPERTS = "router.experts"
ENTRIES = "indexer.entries"


class FollowedChoices:
    """``ops`` compute with the ``experts`` int64 ``[T, P]`` and the ``entries`` int64 ``[T, K]``
    (None: their own) of consecutive tokens, and keep what they would have chosen.
    """

    def __init__(self, experts_TP: Tensor | None, entries_TK: Tensor | None) -> None:
        self.ops: Ops = replace(TORCH, moe=self._moe, index_select=self._index_select)
        self._experts_TP = experts_TP
        self._entries_TK = entries_TK
        self._own: dict[str, list[Tensor]] = {}

    def own(self) -> dict[str, Tensor]:
        """What the ops chose for the tokens so far: ``router.experts`` and ``indexer.entries``."""
        return {name: torch.cat(parts) for name, parts in self._own.items()}

    def _moe(
        self,
        x_TE: Tensor,
        tokens_T: Tensor,
        router: Router,
        experts: ExpertWeights,
        shared: ExpertWeights,
        limit: float,
        out_dtype: torch.dtype | None = None,
    ) -> Mixture:
        own_TP, _ = route(x_TE, tokens_T, router)
        ids_TP = self._next(EXPERTS, own_TP, self._experts_TP)
        # The given experts as the table of a hashed router whose tokens are 0, 1, …
        given = replace(router, hashed=True, selection=ids_TP)
        rows_T = torch.arange(len(tokens_T), device=tokens_T.device)
        return moe(x_TE, rows_T, given, experts, shared, limit, out_dtype)

    def _index_select(
        self,
        q_TID: Tensor,
        weight_TI: Tensor,
        score_scale: float,
        keys: RowCache,
        positions_T: Tensor,
        index_topk: int,
    ) -> Tensor:
        own_TK = index_select(q_TID, weight_TI, score_scale, keys, positions_T, index_topk)
        return self._next(ENTRIES, own_TK, self._entries_TK)

    def _next(self, name: str, own: Tensor, given: Tensor | None) -> Tensor:
        """The choices for the tokens of this call."""
        before = self._own.setdefault(name, [])
        start = sum(len(part) for part in before)
        before.append(own.cpu())
        return own if given is None else given[start : start + len(own)].to(own.device)
