"""Accepting drafts on the GPU: a cluster for every draft, then one warp for the block.

Noise, its use and what top-k keeps are bit for bit those of ``dsv4.ops.acceptance``; probabilities
are float32 there where the torch op has float64, with the edges of top-p and min-p of
``dsv4.ops.sampling.cuda``: a draft within rounding (about 1e-6 of probability) of a decision may
be decided otherwise.
"""

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DRAFTS

_SETTLE = "acceptance/settle"
# As of the sampling kernel; three arrays of values take 192 KB of a block's 227 KB.
_BLOCKS = 8
_THREADS = 1024
_MOST_VALUES = 16


def judge_drafts(
    recording: Recording,
    logits_MV: Tensor,
    draft_logits_NV: Tensor,
    drafts_N: Tensor,
    settings_4: Tensor,
    seed_1: Tensor,
    position_1: Tensor,
) -> Tensor:
    """``dsv4.ops.acceptance.judge_drafts`` of 1 to 7 drafts; ``ValueError`` for others."""
    count = _check_drafts(drafts_N)
    vocabulary = logits_MV.shape[-1]
    most = _BLOCKS * _THREADS * _MOST_VALUES
    if not 1 <= vocabulary <= most:
        raise ValueError(f"logits_MV: found [M, {vocabulary}], expected [M, V] with V to {most}")
    expect("logits_MV", logits_MV, torch.float32, (count + 1, vocabulary))
    expect("draft_logits_NV", draft_logits_NV, torch.float32, (count, vocabulary))
    expect("settings_4", settings_4, torch.float32, (4,))
    expect("seed_1", seed_1, torch.int64, (1,))
    expect("position_1", position_1, torch.int64, (1,))
    values = 4 * ceil_div(vocabulary, _BLOCKS * _THREADS * 4)
    shared_bytes = 3 * 4 * values * _THREADS
    in_vectors = is_aligned(logits_MV) and is_aligned(draft_logits_NV) and vocabulary % 4 == 0
    defines = (
        ("BLOCKS", _BLOCKS),
        ("VALUES", values),
        ("VECTOR", int(in_vectors)),
        ("SHARED_BYTES", shared_bytes),
    )
    replacements_N = recording.empty((count,), torch.int64)
    recording.launch(
        Shape(
            Kernel("acceptance/acceptance", "judge_drafts", defines),
            count * _BLOCKS,
            _THREADS,
            shared_bytes,
            _BLOCKS,
        ),
        logits=logits_MV,
        draft_logits=draft_logits_NV,
        drafts=drafts_N,
        vocabulary=vocabulary,
        count=count,
        settings=settings_4,
        seed=seed_1,
        position=position_1,
        replacements=replacements_N,
    )
    return replacements_N


def settle_block(
    recording: Recording,
    judged: tuple[Tensor, Tensor] | None,
    behind: Tensor,
    place: tuple[Tensor, Tensor],
    next_1: Tensor,
    ring_3R: Tensor,
    nan_1: Tensor,
) -> None:
    """``dsv4.ops.acceptance.settle_block``; ring and ``nan_1`` are on the device of the token or
    pinned.
    """
    replacements_N, drafts_N = (None, None) if judged is None else judged
    position_1, rejected_1 = place
    count = 0
    if drafts_N is not None and replacements_N is not None:
        count = _check_drafts(drafts_N)
        expect("replacements_N", replacements_N, torch.int64, (count,))
    expect("behind", behind, torch.int64, ())
    for name, tensor in (("position_1", position_1), ("rejected_1", rejected_1)):
        expect(name, tensor, torch.int64, (1,))
    expect("next_1", next_1, torch.int64, (1,))
    expect("nan_1", nan_1, torch.int32, (1,))
    slots = ring_3R.shape[-1]
    expect("ring_3R", ring_3R, torch.int64, (3, slots))
    recording.launch(
        Shape(Kernel(_SETTLE, "settle_block"), 1, 32),
        replacements=replacements_N,
        drafts=drafts_N,
        count=count,
        behind=behind,
        position=position_1,
        rejected=rejected_1,
        tokens=next_1,
        ring=ring_3R,
        slots=slots,
        nan=nan_1,
    )


def enter_drafts(recording: Recording, drafts_N: Tensor, tokens_N: Tensor) -> None:
    """``dsv4.ops.acceptance.enter_drafts`` of 1 to 7 drafts."""
    count = _check_drafts(drafts_N)
    expect("tokens_N", tokens_N, torch.int64, (count,))
    recording.launch(
        Shape(Kernel(_SETTLE, "enter_drafts"), 1, 32),
        drafts=drafts_N,
        tokens=tokens_N,
        count=count,
    )


def _check_drafts(drafts_N: Tensor) -> int:
    if drafts_N.dim() != 1 or not 1 <= drafts_N.shape[0] <= MAX_DRAFTS:
        found = list(drafts_N.shape)
        raise ValueError(f"drafts_N: found {found}, expected [N] with N from 1 to {MAX_DRAFTS}")
    expect("drafts_N", drafts_N, torch.int64, (drafts_N.shape[0],))
    return drafts_N.shape[0]
