"""Attention of a draft block, whose tokens see each other in both directions (model.md#dspark)."""

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.ops.attention import sparse_attention
from dsv4.ops.rope import rope


def block_attention(
    q_THD: Tensor, keys: KeySet, sink_H: Tensor, positions_T: Tensor, inv_freq: Tensor
) -> Tensor:
    """Attention of T consecutive tokens that all see the T of them and the ``window`` tokens before
    the first one: ``[T, H, D]``, each rotated back by its own position.

    Arguments as of ``sparse_attention``; the keys of the T tokens must be in the ring, which holds
    at least window + T rows.
    """
    tokens = positions_T.shape[0]
    # The last token's causal window, made longer by the block, is what every token sees.
    seen = KeySet(keys.ring, None, 0, keys.window + tokens)
    last_T = positions_T[-1:].expand(tokens)
    without = torch.zeros_like(inv_freq)
    out_THD = sparse_attention(q_THD, seen, None, sink_H, last_T, without)
    return rope(out_THD, positions_T, inv_freq, inverse=True)
