"""Which drafts of a block stay, and the token behind them, for temperatures above 0.

Draft i, drawn from q_i, is kept with the probability min(1, p_i / q_i) if all before it are; the
token behind those that are kept is drawn from max(p − q, 0), normalised, or from p behind the last
draft. Then every token has the distribution p of the main model, whatever q is (Leviathan et al.
2023; Chen et al. 2023). The functions take any number of blocks B at once.
"""

import torch
from torch import Tensor

# Streams of noise apart from that of the draws themselves: what decides on a draft must not depend
# on what drew it.
_ACCEPTING = 0x5F0E_3A91_77C4_21D5
_REMAINING = 0x29B1_D0C6_4E8F_6A37


def probabilities(
    logits_NV: Tensor, temperature: float, top_p: float, min_p: float, top_k: int
) -> Tensor:
    """The distributions, float64 ``[N, V]``, that ``dsv4.ops.sampling.sample_token`` draws from
    with a temperature above 0.
    """
    if 0 < top_k < logits_NV.shape[1]:
        order = logits_NV.argsort(dim=1, descending=True, stable=True)
        logits_NV = logits_NV.scatter(1, order[:, top_k:], -torch.inf)
    scaled = (logits_NV.float() - logits_NV.amax(1, keepdim=True)) / temperature
    found = torch.softmax(scaled, dim=1)
    keep = found >= min_p * found.amax(1, keepdim=True)
    if top_p < 1.0:
        ordered, order = found.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        keep &= torch.zeros_like(keep).scatter(1, order, before < top_p)
    kept = torch.where(keep, torch.softmax(scaled.double(), dim=1), 0.0)
    return kept / kept.sum(1, keepdim=True)


def accepted_drafts(p_BNV: Tensor, q_BNV: Tensor, drafts_BN: Tensor, uniform_BN: Tensor) -> Tensor:
    """How many drafts of each block are kept, int64 ``[B]``.

    ``p`` and ``q`` are float64 distributions, ``drafts`` int64, ``uniform`` float64 from 0 to 1,
    independent of the drafts.
    """
    p_BN, q_BN = (of.gather(2, drafts_BN[..., None]).squeeze(2) for of in (p_BNV, q_BNV))
    kept_BN = uniform_BN * q_BN < p_BN
    return kept_BN.cumprod(1).sum(1)


def behind_accepted(p_BMV: Tensor, q_BNV: Tensor, accepted_B: Tensor) -> Tensor:
    """The distribution of the token behind the drafts that are kept, float64 ``[B, V]``; M = N + 1
    are the drafts and the token behind all of them.
    """
    q_BMV = torch.nn.functional.pad(q_BNV, (0, 0, 0, 1))
    index_B1V = accepted_B[:, None, None].expand(-1, 1, p_BMV.shape[2])
    p_BV, q_BV = (of.gather(1, index_B1V).squeeze(1) for of in (p_BMV, q_BMV))
    rest_BV = (p_BV - q_BV).clamp(min=0)
    total_B1 = rest_BV.sum(1, keepdim=True)
    # Where p is q but for a rounding, nothing is left to draw from.
    return torch.where(total_B1 > 0, rest_BV / total_B1.clamp(min=1e-300), p_BV)


def drawn(distribution_BV: Tensor, noise_BV: Tensor) -> Tensor:
    """A draw from each distribution by the Gumbel-max rule, int64 ``[B]``."""
    return (distribution_BV.log() + noise_BV).argmax(1)


def accepting_seed(seed: int) -> int:
    """The seed of the noise that decides on drafts."""
    return seed ^ _ACCEPTING


def remaining_seed(seed: int) -> int:
    """The seed of the noise that draws in the place of a draft that is not kept."""
    return seed ^ _REMAINING
