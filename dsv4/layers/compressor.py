"""A compressor: pools two projections of the attention input into cached rows every ``ratio``
tokens.
"""

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import WeightReader
from dsv4.ops.compressor import CompressorWeights

# Rows of the attention layer's input list.
PROJECTIONS = ("wkv.weight", "wgate.weight")


def compressor_weights(
    config: ModelConfig,
    weights: WeightReader,
    ratio: int,
    inv_freq: Tensor,
    compute_dtype: torch.dtype,
    rotate_keys: bool,
) -> CompressorWeights:
    """The main compressor of a CSA or HCA layer, or (``rotate_keys``) the indexer's own."""
    return CompressorWeights(
        ape=weights.vector("ape"),
        norm=weights.vector("norm.weight"),
        inv_freq=inv_freq,
        norm_eps=config.rms_norm_eps,
        ratio=ratio,
        rotate_keys=rotate_keys,
        compute_dtype=compute_dtype,
    )
