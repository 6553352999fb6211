"""Log-probabilities of a chosen token and of the most likely ones."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature and restrictions.

    ``logprob`` is that of the chosen ``token_id``. ``top``: ids and log-probabilities of the most
    likely tokens in their order, of equal ones the lowest id first; the chosen one may be missing.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, ids_N: Tensor, logprobs_N: Tensor) -> "TokenLogprobs":
        """From the results of ``rank_tokens``."""
        token_id, *ids = ids_N.tolist()
        logprob, *logprobs = logprobs_N.tolist()
        return cls(token_id, logprob, tuple(zip(ids, logprobs, strict=True)))


def rank_tokens(logits_V: Tensor, token: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """int64 ``[1 + count]`` ids: the chosen ``token`` (int64 scalar), then those of the ``count``
    largest logits; and float32 ``[1 + count]`` log softmax(logits) of them. The host waits for
    nothing.

    A ``token`` below 0 (``NAN_TOKEN``) counts as 0.
    """
    logprobs_V = torch.log_softmax(logits_V.float(), dim=-1)
    largest = logits_V.argsort(descending=True, stable=True)[:count]
    ids_N = torch.cat((token.clamp(min=0).reshape(1), largest))
    return ids_N, logprobs_V.gather(0, ids_N)


def rank_rows(logits_TV: Tensor, tokens_T: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``rank_tokens`` of T rows and one of the int64 ``tokens_T`` for each: ids and
    log-probabilities ``[T, 1 + count]``.
    """
    logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    largest_TN = logits_TV.argsort(dim=-1, descending=True, stable=True)[:, :count]
    ids_TN = torch.cat((tokens_T[:, None], largest_TN), dim=1)
    return ids_TN, logprobs_TV.gather(1, ids_TN)
