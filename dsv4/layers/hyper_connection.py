"""The mHC seams around a sublayer."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops import Ops
from dsv4.ops.hyper_connection import HcWeights


class Residual(NamedTuple):
    """The streams ``[T, M, E]`` before a sublayer, and post ``[T, M]`` and comb ``[T, M, M]``,
    which say how its result goes back into them.
    """

    streams_TME: Tensor
    post_TM: Tensor
    comb_TMM: Tensor


class Unmixed(NamedTuple):
    """A sublayer's result y ``[T, E]`` that is not in the streams yet: the next seam mixes it in
    and goes on in one launch. With several ranks it may still be on its way from them.
    """

    y_TE: Any
    residual: Residual


@dataclass(frozen=True)
class HyperConnection:
    """Collapses the streams for one sublayer (with its RMSNorm). ``sublayer``: "attn" or "ffn"."""

    weights: HcWeights
    norm: Tensor

    @classmethod
    def build(cls, config: ModelConfig, weights: WeightReader, sublayer: str) -> "HyperConnection":
        mix = HcWeights(
            fn=weights.vector(f"hc_{sublayer}_fn"),
            base=weights.vector(f"hc_{sublayer}_base"),
            scale=weights.vector(f"hc_{sublayer}_scale"),
            norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            sinkhorn_iters=config.hc_sinkhorn_iters,
        )
        return cls(mix, weights.vector(f"{sublayer}_norm.weight"))

    def enter(self, ops: Ops, incoming: Tensor | Unmixed) -> tuple[Tensor, Residual]:
        """Streams, or what the sublayer before this one left unmixed → normalised input x ``[T,
        E]`` and residual.
        """
        if isinstance(incoming, Unmixed):
            streams_TME, x_TE, *mixing = ops.hc_seam(
                incoming.y_TE, *incoming.residual, self.weights, self.norm
            )
        else:
            streams_TME = incoming
            x_TE, *mixing = ops.hc_pre(streams_TME, self.weights, self.norm)
        return x_TE, Residual(streams_TME, *mixing)

    def mix(self, ops: Ops, unmixed: Unmixed) -> Tensor:
        """The streams ``[T, M, E]`` after the sublayer."""
        return ops.hc_post(unmixed.y_TE, *unmixed.residual)
