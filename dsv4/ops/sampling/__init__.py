"""Choosing one token from logits on the device: greedy, or a seeded draw (model.md#sampling).

The settings and the seed are values on the device, so that one captured step serves every sampler.
"""

import torch
from torch import Tensor

NAN_TOKEN = -1
_MASK = 0xFFFFFFFF


def sample_token(
    logits_V: Tensor, settings_4: Tensor, seed_1: Tensor, position_1: Tensor
) -> Tensor:
    """int64 scalar: the next token, chosen by float32 ``settings_4`` = (temperature, top_p, min_p,
    top_k).

    Temperature 0: the largest logit, the lowest id on ties.

    Else a draw from softmax(logits / temperature), restricted by top-k, top-p and min-p, by the
    Gumbel-max rule. top-k keeps the top_k largest logits (0: all; ties: lowest id first), and the
    softmax is that of what it keeps. top-p keeps the smallest set of most likely tokens whose
    probabilities sum to at least top_p (never empty; ties in probability: lowest id first), min-p
    tokens with probability ≥ min_p · the largest one. The noise is a pure function of (seed,
    position, token id), so a run can be repeated and does not depend on how the vocabulary is
    split. ``NAN_TOKEN`` at any temperature when there is no distribution: a logit is NaN or +∞, or
    all are −∞.

    ``seed_1`` and ``position_1``: int64 ``[1]``; the position is that of the new token.
    """
    temperature, top_p, min_p, top_k = settings_4.tolist()
    if temperature == 0:
        return _greedy_token(logits_V)
    noise_V = gumbel_noise(logits_V.shape[0], int(seed_1), position_1)
    if 0 < top_k < logits_V.shape[0]:
        order = logits_V.argsort(descending=True, stable=True)
        logits_V = logits_V.index_fill(0, order[int(top_k) :], -torch.inf)
    return _drawn_token(logits_V, temperature, top_p, min_p, noise_V)


def _greedy_token(logits_V: Tensor) -> Tensor:
    ids = torch.arange(logits_V.shape[0], device=logits_V.device)
    largest = logits_V.max()
    token = torch.where(logits_V == largest, ids, logits_V.shape[0]).min()
    return torch.where(largest.isfinite(), token, NAN_TOKEN)


def _drawn_token(
    logits_V: Tensor, temperature: float, top_p: float, min_p: float, noise_V: Tensor
) -> Tensor:
    # Relative to the largest logit, so that a temperature close to 0 cannot overflow.
    scaled = (logits_V.float() - logits_V.max()) / temperature
    probability = torch.softmax(scaled, dim=-1)
    keep = probability >= min_p * probability.max()
    if top_p < 1.0:
        ordered, order = probability.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        keep &= torch.zeros_like(keep).index_copy_(0, order, before < top_p)
    noisy = torch.where(keep, scaled + noise_V, -torch.inf)
    return torch.where(scaled.isnan().any(), NAN_TOKEN, noisy.argmax())


def gumbel_noise(vocab_size: int, seed: int, position_1: Tensor) -> Tensor:
    """float32 ``[V]`` standard Gumbel noise: a pure hash of (seed, position, token id)."""
    ids = torch.arange(vocab_size, dtype=torch.int64, device=position_1.device)
    state = _mix(position_1.to(torch.int64) ^ _mix(torch.full_like(ids[:1], seed & _MASK)))
    state = _mix(ids ^ _mix(state ^ ((seed >> 32) & _MASK)))
    uniform = ((state >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform)).float()


def _mix(word: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift and odd multiply) on int64 lanes.

    A wrapped int64 product keeps its low 32 bits.
    """
    word = (word ^ (word >> 16)) * 0x7FEB352D & _MASK
    word = (word ^ (word >> 15)) * 0x846CA68B & _MASK
    return word ^ (word >> 16)
