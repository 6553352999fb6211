"""Router: which P experts a token goes to and with what weights (model.md#routing)."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dsv4.weights.quant import Weight

AnyWeight = TypeVar("AnyWeight", bound=Weight)


@dataclass(frozen=True)
class Router(Generic[AnyWeight]):
    """``gate`` ``[X, E]``. ``selection``: the bias float32 ``[X]`` of a learned router, or, if
    ``hashed``, the table int64 ``[V, P]`` of the experts of every token id. The weights of a token
    sum to ``scaling``.
    """

    gate: AnyWeight
    selection: Tensor
    hashed: bool
    experts_per_token: int
    scaling: float


def route(x_TE: Tensor, tokens_T: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """``route_hash`` or ``route_learned``, which does not look at the token ids int64 ``[T]``."""
    if router.hashed:
        return route_hash(x_TE, router.gate, router.selection, tokens_T, router.scaling)
    return route_learned(
        x_TE, router.gate, router.selection, router.experts_per_token, router.scaling
    )


def route_learned(
    x_TE: Tensor, gate: Weight, bias_X: Tensor, experts_per_token: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Selects the top P of sqrt(softplus(logit)) + bias; weights come from the unbiased scores.

    Returns (expert ids int64 ``[T, P]``, weights float32 ``[T, P]`` that sum to ``scaling``). Ties:
    the lowest expert wins.
    """
    log_score = _log_score(x_TE, gate)
    _, order = (log_score.exp() + bias_X).sort(dim=-1, descending=True, stable=True)
    ids = order[:, :experts_per_token]
    return ids, _weights(log_score, ids, scaling)


def route_hash(
    x_TE: Tensor, gate: Weight, tid2eid_VP: Tensor, tokens_T: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Expert ids from the token-id table, weights from the learned gate. Same results as
    ``route_learned``.
    """
    ids = tid2eid_VP[tokens_T]
    return ids, _weights(_log_score(x_TE, gate), ids, scaling)


def _log_score(x_TE: Tensor, gate: Weight) -> Tensor:
    """log sqrt(softplus(x · gateᵀ)) in float32; below −15 softplus(l) is eˡ to float32 precision,
    its log is l.
    """
    logits = x_TE.float() @ gate.dequantize().T
    softplus = torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)
    return 0.5 * torch.where(logits < -15, logits, softplus.log())


def _weights(log_score_TX: Tensor, ids_TP: Tensor, scaling: float) -> Tensor:
    """a_e / Σ a over the selected experts, computed in the log domain so that very negative logits
    cannot give 0/0.
    """
    return torch.softmax(log_score_TX.gather(1, ids_TP), dim=-1) * scaling
