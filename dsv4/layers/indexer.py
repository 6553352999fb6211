"""Lightning indexer of a CSA layer: chooses the compressed entries attention reads."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.caches.layer import CompressedState
from dsv4.config import ModelConfig
from dsv4.ops import Ops


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
    ) -> Tensor:
        """Selects int64 ``[T, K]`` compressed entries, −1 for none, among the index keys stored so
        far.

        q ``[T, I, D]`` are the rotated queries, weight float32 ``[T, I]`` = weights_proj · x.
        """
        score_scale = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        return ops.index_select(
            q_TID, weight_TI, score_scale, state.rows, positions_T, self.config.index_topk
        )
