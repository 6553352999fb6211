"""Choosing a token on the GPU: one launch of one cluster of 8 blocks, without a copy to the host.

The noise and its addition to the scaled logits are bit for bit those of ``dsv4.ops.sampling``. Sums of probabilities
are float32 in another order than torch's, and tokens whose scaled logits differ by less than 2⁻²⁰ count as tied at the
edge of top-p: a token within rounding (about 1e-6 of probability) of the edge of top-p or min-p may be kept by one and
not by the other.
"""

import torch
from torch import Tensor

from dsv4.launch.loader import launch

_BLOCKS, _THREADS = 8, 1024
_MAX_VALUES = 24
_WORD = 0xFFFFFFFF


def argmax_token(logits_V: Tensor) -> Tensor:
    """``dsv4.ops.sampling.argmax_token``; logits of another dtype are converted to float32 in a launch of their own."""
    logits_V, token = _checked(logits_V)
    _launch("argmax_token", logits_V, token, arrays=0)
    return token


def sample_token(
    logits_V: Tensor, temperature: float, top_p: float, min_p: float, seed: int, position_1: Tensor
) -> Tensor:
    """``dsv4.ops.sampling.sample_token``; ``position_1`` int64 on the device of the logits."""
    logits_V, token = _checked(logits_V)
    if position_1.dtype != torch.int64 or position_1.numel() != 1 or position_1.device != logits_V.device:
        found = f"{position_1.dtype} {list(position_1.shape)} on {position_1.device}"
        raise ValueError(f"position_1: found {found}, expected torch.int64 [1] on {logits_V.device}")
    settings = (float(temperature), float(top_p), float(min_p), seed & _WORD, seed >> 32 & _WORD)
    arrays = 2 if top_p < 1.0 else 1
    _launch("sample_token", logits_V, position_1, token, *settings, arrays=arrays)
    return token


def _checked(logits_V: Tensor) -> tuple[Tensor, Tensor]:
    """float32 logits, and the memory for the token."""
    largest = _BLOCKS * _THREADS * _MAX_VALUES
    if logits_V.dim() != 1 or not 1 <= logits_V.shape[0] <= largest:
        raise ValueError(f"logits_V: found {list(logits_V.shape)}, expected [V] with V from 1 to {largest}")
    return logits_V.float().contiguous(), torch.empty((), dtype=torch.int64, device=logits_V.device)


def _launch(function: str, logits_V: Tensor, *arguments: Tensor | int | float, arrays: int) -> None:
    """Each block keeps ``arrays`` float32 arrays of its part of the vocabulary in shared memory.

    The loader raises the limit for more than 48 KB, but static shared memory counts as well: hence 16 bytes more.
    """
    vocabulary, device = logits_V.shape[0], logits_V.device
    values = -(-vocabulary // (_BLOCKS * _THREADS * 4)) * 4
    vector = vocabulary % 4 == 0 and logits_V.data_ptr() % 16 == 0
    launch(
        "sampling",
        function,
        _BLOCKS,
        _THREADS,
        logits_V,
        vocabulary,
        *arguments,
        device=device,
        shared_bytes=4 * arrays * values * _THREADS + 16,
        cluster=_BLOCKS,
        defines=(("BLOCKS", _BLOCKS), ("VALUES", values), ("VECTOR", int(vector)), ("TOP_P", int(arrays == 2))),
    )
