"""The way of a sampled token to the host and to the next step."""

from torch import Tensor

from dsv4.ops.sampling import NAN_TOKEN


def store_token(
    token: Tensor, position_1: Tensor, next_1: Tensor, ring_R: Tensor, nan_1: Tensor
) -> None:
    """ring[p mod R] = token and next = max(token, 0).

    ``token`` is an int64 scalar, p the int64 ``position_1``, the others are int64 too but for
    ``nan_1``, int32: where it is not 0, NaN was met on the way to the token, and ``NAN_TOKEN`` is
    stored instead. A token below 0 is the sign of a fault. The host, which reads the ring, sees it;
    a step that was queued meanwhile gets a token that exists. The ring and ``nan_1`` may be pinned
    host memory.
    """
    sampled = NAN_TOKEN if bool(nan_1) else int(token)
    ring_R[int(position_1) % ring_R.shape[0]] = sampled
    next_1.fill_(max(sampled, 0))
