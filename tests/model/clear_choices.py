"""How close the choices of a model's ops were: of experts by their scores, of compressed entries by
those of the indexer.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.config import CSA_RATIO
from dsv4.ops import Ops
from dsv4.ops.indexer import entry_scores
from dsv4.ops.moe import Mixture
from dsv4.ops.router import Router


class ClearChoices:
    """``ops`` are those given, and note in ``closest`` the least distance yet between the last
    score that was chosen and the first that was not, over the largest score of that token; infinite
    where nothing was left out.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.closest = math.inf
        self.ops = dataclasses.replace(ops, moe=self._moe, index_select=self._index_select)

    def _note(self, score_TN: Tensor, chosen: int) -> None:
        """Scores of −inf are not there to be chosen."""
        ordered_TN = score_TN.sort(dim=-1, descending=True).values
        distance_T = ordered_TN[:, chosen - 1] - ordered_TN[:, chosen]
        largest_T = score_TN.masked_fill(score_TN == -torch.inf, 0.0).abs().amax(-1)
        decided_T = ordered_TN[:, chosen] != -torch.inf
        clear = (distance_T / largest_T)[decided_T].tolist()
        self.closest = min([self.closest, *clear])

    def _moe(self, x_TE: Tensor, tokens_T: Tensor, router: Router, *rest: Any) -> Mixture:
        if not router.hashed:
            logits_TX = x_TE.float() @ router.gate.dequantize().T
            score_TX = torch.nn.functional.softplus(logits_TX).sqrt()
            self._note(score_TX + router.selection, router.experts_per_token)
        return self._ops.moe(x_TE, tokens_T, router, *rest)

    def _index_select(
        self,
        q_TID: Tensor,
        weight_TI: Tensor,
        score_scale: float,
        keys: RowCache,
        positions_T: Tensor,
        index_topk: int,
        *rest: Any,
    ) -> Tensor:
        visible_T = (positions_T + 1) // CSA_RATIO
        entries = int(visible_T.max())
        if entries > index_topk:
            entry_TN = torch.arange(entries).expand(len(positions_T), -1)
            entry_TN = entry_TN.masked_fill(entry_TN >= visible_T[:, None], -1)
            score_TN = entry_scores(q_TID, weight_TI, score_scale, keys, entry_TN)
            self._note(score_TN, index_topk)
        return self._ops.index_select(
            q_TID, weight_TI, score_scale, keys, positions_T, index_topk, *rest
        )
