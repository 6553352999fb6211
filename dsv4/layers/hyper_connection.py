"""The mHC seams around a sublayer."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.hyper_connection import HcWeights


@dataclass(frozen=True)
class HyperConnection:
    """Collapses the streams for one sublayer (with its RMSNorm) and mixes the result back. ``sublayer``: "attn" or
    "ffn".
    """

    ops: Ops
    mix: HcWeights
    norm: Tensor

    @classmethod
    def build(cls, config: ModelConfig, weights: WeightReader, ops: Ops, sublayer: str) -> "HyperConnection":
        mix = HcWeights(
            fn=weights.vector(f"hc_{sublayer}_fn"),
            base=weights.vector(f"hc_{sublayer}_base"),
            scale=weights.vector(f"hc_{sublayer}_scale"),
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            sinkhorn_iters=config.hc_sinkhorn_iters,
        )
        return cls(ops, mix, weights.vector(f"{sublayer}_norm.weight"))

    def pre(self, streams_TME: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(normalised sublayer input ``[T, E]``, post ``[T, M]``, comb ``[T, M, M]``)."""
        return self.ops.hc_pre(streams_TME, self.mix, self.norm)

    def seam(
        self, y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``post`` of the sublayer before this one and ``pre`` of this one: (streams, x, post, comb)."""
        return self.ops.hc_seam(y_TE, streams_TME, post_TM, comb_TMM, self.mix, self.norm)

    def post(self, y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
        """The streams ``[T, M, E]`` after the sublayer; ``streams_TME`` are those before ``pre``."""
        return self.ops.hc_post(y_TE, streams_TME, post_TM, comb_TMM)
