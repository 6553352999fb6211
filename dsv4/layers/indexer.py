"""Lightning indexer of a CSA layer: chooses the compressed entries attention reads."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dsv4.caches.layer import CompressedState
from dsv4.config import ModelConfig
from dsv4.ops import Ops


class Selection(NamedTuple):
    """The chosen entries int64 ``[T, K]``, −1 for none, and what with the index queries decides on
    them: head weights float32 ``[T, I]`` and the scale of a score.
    """

    selected_TK: Tensor
    weight_TI: Tensor
    score_scale: float


@dataclass(frozen=True)
class Indexer:
    """Queries come from c_q (the q_norm output), head weights from x, keys from its own compressor.

    model.md#indexer.
    """

    config: ModelConfig

    def __call__(
        self,
        ops: Ops,
        q_TID: Tensor,
        weight_TI: Tensor,
        positions_T: Tensor,
        state: CompressedState,
    ) -> Selection:
        """Selects compressed entries among the index keys stored so far.

        q ``[T, I, D]`` are the rotated queries, weight float32 ``[T, I]`` = weights_proj · x.
        """
        score_scale = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        topk = self.config.index_topk
        selected_TK = ops.index_select(q_TID, weight_TI, score_scale, state.rows, positions_T, topk)
        return Selection(selected_TK, weight_TI, score_scale)
