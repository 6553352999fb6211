"""Choosing a token on the GPU: one launch of one cluster of 8 blocks, without a copy to the host.

The noise, its addition to the scaled logits and what top-k keeps are bit for bit those of
``dsv4.ops.sampling``. Sums of probabilities are float32 in another order than torch's, and tokens
whose scaled logits differ by less than 2⁻²⁰ count as tied at the edge of top-p: a token within
rounding (about 1e-6 of probability) of the edge of top-p or min-p may be kept by one and not by the
other.
"""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording

# The largest cluster that every GPU allows, of the largest blocks.
_BLOCKS = 8
_THREADS = 1024
# Both arrays of top-p then take 192 KB of a block's 227 KB of shared memory.
_MOST_VALUES = 24


def sample_token(
    recording: Recording, logits_V: Tensor, settings_4: Tensor, seed_1: Tensor, position_1: Tensor
) -> Tensor:
    """``dsv4.ops.sampling.sample_token`` of float32 logits; ``ValueError`` for others."""
    most = _BLOCKS * _THREADS * _MOST_VALUES
    if logits_V.dim() != 1 or not 1 <= logits_V.shape[0] <= most:
        found = list(logits_V.shape)
        raise ValueError(f"logits_V: found {found}, expected [V] with V from 1 to {most}")
    vocabulary = logits_V.shape[0]
    expect("logits_V", logits_V, torch.float32, (vocabulary,))
    expect("settings_4", settings_4, torch.float32, (4,))
    expect("seed_1", seed_1, torch.int64, (1,))
    expect("position_1", position_1, torch.int64, (1,))
    # Each thread has this many logits, in loads of four. Top-p keeps two float32 arrays of them.
    values = 4 * ceil_div(vocabulary, _BLOCKS * _THREADS * 4)
    shared_bytes = 2 * 4 * values * _THREADS
    defines = (
        ("BLOCKS", _BLOCKS),
        ("VALUES", values),
        ("VECTOR", int(vocabulary % 4 == 0 and is_aligned(logits_V))),
        ("SHARED_BYTES", shared_bytes),
    )
    kernel = Kernel("sampling/sampling", "sample_token", defines)
    token = recording.empty((), torch.int64)
    recording.launch(
        Shape(kernel, _BLOCKS, _THREADS, shared_bytes, _BLOCKS),
        logits=logits_V,
        vocabulary=vocabulary,
        settings=settings_4,
        seed=seed_1,
        position=position_1,
        token=token,
    )
    return token
