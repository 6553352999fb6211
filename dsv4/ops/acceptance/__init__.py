"""Which drafts of a block stay, and the token behind them.

At temperatures above 0 draft i, drawn from q_i, is kept with the probability min(1, p_i / q_i) if
all before it are; the token behind those that are kept is drawn from max(p − q, 0), normalised,
or from p behind the last draft. Then every token has the distribution p of the main model, whatever
q is (Leviathan et al. 2023; Chen et al. 2023). ``accepted_drafts``, ``behind_accepted`` and
``drawn`` take any number of blocks B at once.
"""

import torch
from torch import Tensor

from dsv4.ops.sampling import NAN_TOKEN, gumbel_noise, sample_token

# In the place of a draft that stays.
KEPT = -2
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


def judge_drafts(
    logits_MV: Tensor,
    draft_logits_NV: Tensor,
    drafts_N: Tensor,
    settings_4: Tensor,
    seed_1: Tensor,
    position_1: Tensor,
) -> Tensor:
    """int64 ``[N]``: of each draft ``KEPT``, or the token in its place; ``NAN_TOKEN`` where the
    main model has no distribution.

    ``logits_MV`` float32 are the main model's, M = N + 1, of which the last row is not read;
    ``draft_logits_NV`` those that chose the drafts int64 ``[N]``. A draft below 0 is none: the row
    is drawn from p with the noise of any token. Settings and seed as of
    ``dsv4.ops.sampling.sample_token``; ``position_1``: of the token behind all drafts. At
    temperature 0 a draft is kept that is the largest logit, the lowest id on ties.
    """
    temperature, top_p, min_p, top_k = settings_4.tolist()
    seed = int(seed_1)
    count = drafts_N.shape[0]
    first = int(position_1) - count
    replacements = []
    for row, draft in enumerate(drafts_N.tolist()):
        logits_V = logits_MV[row]
        at_1 = torch.tensor([first + row], dtype=torch.int64, device=logits_V.device)
        if not bool(logits_V.amax().isfinite()):
            replacements.append(NAN_TOKEN)
        elif temperature == 0 or draft < 0:
            token = int(sample_token(logits_V, settings_4, seed_1, at_1))
            replacements.append(KEPT if token == draft else token)
        else:
            both_2V = torch.stack((logits_V, draft_logits_NV[row]))
            p_1V, q_1V = probabilities(both_2V, temperature, top_p, min_p, int(top_k)).split(1)
            replacements.append(_replacement(p_1V, q_1V, draft, seed, at_1))
    return torch.tensor(replacements, dtype=torch.int64, device=drafts_N.device)


def settle_block(
    judged: tuple[Tensor, Tensor] | None,
    behind: Tensor,
    place: tuple[Tensor, Tensor],
    next_1: Tensor,
    ring_3R: Tensor,
    nan_1: Tensor,
) -> None:
    """The end of a step of a token and N drafts: how many of its M = N + 1 tokens do not count goes
    to the second tensor of ``place``, the token behind the others to ``next_1`` and all for the
    host to the ring; all are int64.

    ``judged`` are the replacements of ``judge_drafts`` and the drafts, None without drafts.
    ``behind`` is the token behind the last draft, the first tensor of ``place`` the position of
    that token: the step has begun at p = position − M.
    ring[0, q mod R] is the token of position q, ring[1, p mod R] how many tokens the step gave:
    the drafts up to the first that is not kept, and the token there. ring[2, p mod R] is the number
    of drafts before the first one below 0. Where a token is ``NAN_TOKEN``, or ``nan_1`` not 0, a
    step with drafts gives none, and ``next_1`` stays; one without gives ``NAN_TOKEN``.
    """
    replacements: list[int] = []
    drafts: list[int] = []
    if judged is not None:
        replacements, drafts = (tensor.tolist() for tensor in judged)
    position_1, rejected_1 = place
    count = len(drafts)
    slots = ring_3R.shape[1]
    tokens = [*replacements, int(behind)]
    start = int(position_1) - count - 1
    accepted = next(index for index, token in enumerate(tokens) if token != KEPT)
    given = [*drafts[:accepted], tokens[accepted]]
    if NAN_TOKEN in tokens or bool(nan_1):
        given = [] if count else [NAN_TOKEN]
    for index, token in enumerate(given):
        ring_3R[0, (start + 1 + index) % slots] = token
    ring_3R[1, start % slots] = len(given)
    ring_3R[2, start % slots] = next((i for i, draft in enumerate(drafts) if draft < 0), count)
    rejected_1.fill_(count + 1 - len(given))
    if given:
        next_1.fill_(max(given[-1], 0))


def enter_drafts(drafts_N: Tensor, tokens_N: Tensor) -> None:
    """tokens = max(drafts, 0), both int64 ``[N]``: drafts below 0 are none."""
    tokens_N.copy_(drafts_N.clamp(min=0))


def _replacement(p_1V: Tensor, q_1V: Tensor, draft: int, seed: int, at_1: Tensor) -> int:
    drafts_11 = torch.tensor([[draft]], dtype=torch.int64, device=p_1V.device)
    gumbel_1 = gumbel_noise(1, accepting_seed(seed), at_1)
    uniform_11 = torch.exp(-torch.exp(-gumbel_1.double()))[None]
    accepted_1 = accepted_drafts(p_1V[None], q_1V[None], drafts_11, uniform_11)
    if int(accepted_1):
        return KEPT
    rest_1V = behind_accepted(torch.stack((p_1V, p_1V), 1), q_1V[None], accepted_1)
    return int(drawn(rest_1V, gumbel_noise(p_1V.shape[1], remaining_seed(seed), at_1)[None]))
