"""Torch ops that follow somebody's choices, so that a near tie does not end a comparison: behind
another expert, or another entry, nothing can be compared.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.caches.rows import RowCache
from dsv4.config import CSA_RATIO
from dsv4.ops import TORCH, Ops
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.router import Router, route

EXPERTS = "router.experts"
ENTRIES = "indexer.entries"


class FollowedChoices:
    """``ops``, those of ``base``, compute with the ``experts`` ``[T, P]`` and the ``entries`` ``[T,
    K]`` (None: their own) of consecutive tokens, integers, and keep what they would have chosen. A
    token whose ids cannot be computed with, which are repeated or out of range, has its own ones.
    """

    def __init__(
        self, experts_TP: Tensor | None, entries_TK: Tensor | None, base: Ops = TORCH
    ) -> None:
        self.ops: Ops = replace(base, moe=self._moe, index_select=self._index_select)
        # With the sum of experts unrounded, too, as ranks ask for it.
        self._base_moe: Callable[..., Mixture] = base.moe
        self._base_index_select = base.index_select
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
        number_T = torch.full_like(own_TP[:, 0], router.gate.shape[0])
        ids_TP = self._next(EXPERTS, own_TP, self._experts_TP, number_T)
        # The given experts as the table of a hashed router whose tokens are 0, 1, …
        given = replace(router, hashed=True, selection=ids_TP)
        rows_T = torch.arange(len(tokens_T), device=tokens_T.device)
        return self._base_moe(x_TE, rows_T, given, experts, shared, limit, out_dtype)

    def _index_select(
        self,
        q_TID: Tensor,
        weight_TI: Tensor,
        score_scale: float,
        keys: RowCache,
        positions_T: Tensor,
        index_topk: int,
    ) -> Tensor:
        own_TK = self._base_index_select(
            q_TID, weight_TI, score_scale, keys, positions_T, index_topk
        )
        return self._next(ENTRIES, own_TK, self._entries_TK, (positions_T + 1) // CSA_RATIO)

    def _next(self, name: str, own_TK: Tensor, given_TK: Tensor | None, number_T: Tensor) -> Tensor:
        """The choices for the tokens of this call, each of the first ``number`` ones. Only of
        entries a token may have fewer, with −1 behind them.
        """
        before = self._own.setdefault(name, [])
        start = sum(len(part) for part in before)
        before.append(own_TK.cpu())
        if given_TK is None or (name == EXPERTS and given_TK.shape[1] != own_TK.shape[1]):
            return own_TK
        ids_TK = given_TK[start : start + len(own_TK)].to(own_TK)
        ids_TK, own_TK = _as_wide(ids_TK, own_TK)
        least = 0 if name == EXPERTS else -1
        return torch.where(_usable(ids_TK, least, number_T)[:, None], ids_TK, own_TK)


def _usable(ids_TK: Tensor, least: int, number_T: Tensor) -> Tensor:
    """bool ``[T]``: whether a token has ids from ``least`` to below its number, only −1 twice."""
    ordered_TK = ids_TK.sort(-1).values
    is_repeated = (ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] >= 0)
    is_known = (ids_TK >= least) & (ids_TK < number_T[:, None])
    return is_known.all(-1) & ~is_repeated.any(-1)


def _as_wide(one_TK: Tensor, other_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Both as wide as the wider one, with −1 behind what they have."""
    width = max(one_TK.shape[1], other_TK.shape[1])
    pads = ((0, width - one_TK.shape[1]), (0, width - other_TK.shape[1]))
    one, other = (pad(ids, by, value=-1) for ids, by in zip((one_TK, other_TK), pads, strict=True))
    return one, other
