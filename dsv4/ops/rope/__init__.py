"""Interleaved rotary position embedding on the last R dimensions, and its two frequency tables
(model.md#rope).
"""

import math

import torch
from torch import Tensor

from dsv4.config import ModelConfig, Yarn
from dsv4.ops.norm import rms_norm


def rope(x: Tensor, positions_T: Tensor, inv_freq: Tensor, inverse: bool = False) -> Tensor:
    """Rotates pairs (2i, 2i + 1) of the last R = 2·len(inv_freq) dimensions by ±position ·
    inv_freq[i].

    x ``[T, D]`` or ``[T, H, D]``; positions integer ``[T]``; inv_freq float32 ``[R/2]``. The angle
    is one float32 product; the rotation is float32 with one rounding to the dtype of x. ``inverse``
    rotates back (conjugate).
    """
    angle = positions_T.float()[:, None] * inv_freq
    if x.dim() == 3:
        angle = angle[:, None]
    cos = angle.cos()
    sin = angle.sin()
    if inverse:
        sin = -sin
    rotary_width = 2 * inv_freq.shape[0]
    a, b = x[..., -rotary_width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rotary_width], rotated.to(x.dtype)), dim=-1)


def query_rope(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor, eps: float) -> Tensor:
    """rope(rms_norm(q)) per head, without a norm weight, for q ``[T, H, D]``; the norm is rounded
    too (model.md#queries-and-keys).
    """
    return rope(rms_norm(q_THD, None, eps), positions_T, inv_freq)


def layer_inv_freq(config: ModelConfig, ratio: int) -> Tensor:
    """float32 ``[R/2]`` frequencies of a layer, used for everything in it: q, window keys,
    compressed keys, indexer, output.

    Sliding-window-only layers (ratio 0) use ``rope_theta`` without YaRN; all others
    ``compress_rope_theta`` with YaRN.
    """
    if ratio == 0:
        return _base_inv_freq(config.rope_theta, config.qk_rope_head_dim)
    base = _base_inv_freq(config.compress_rope_theta, config.qk_rope_head_dim)
    return (
        base if config.yarn is None else _apply_yarn(base, config.compress_rope_theta, config.yarn)
    )


def _base_inv_freq(theta: float, width: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def _apply_yarn(inv_freq: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Blends f and f / factor with a linear ramp between the dimensions that turn beta_fast and
    beta_slow times.
    """
    pairs = inv_freq.shape[0]
    width = 2 * pairs

    def correction(rotations: float) -> float:
        return (
            width
            * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), width - 1)
    ramp = (
        (torch.arange(pairs, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    ).clamp(0, 1)
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp)
