"""The way of a sampled token to the host and to the next step."""

from torch import Tensor


def store_token(token: Tensor, position_1: Tensor, next_1: Tensor, ring_R: Tensor) -> None:
    """ring[p mod R] = token and next = max(token, 0).

    ``token`` is an int64 scalar, p the int64 ``position_1``, the others are int64 too. A token
    below 0 is the sign of a fault. The host, which reads the ring, sees it; a step that was queued
    meanwhile gets a token that exists. The ring may be pinned host memory.
    """
    ring_R[int(position_1) % ring_R.shape[0]] = token
    next_1.copy_(token.clamp(min=0).expand(1))
