"""Attention of many tokens, and the pass before it that dequantizes rows, executed on the CPU as
Hopper and other GPUs have them, against the torch op.
"""

from itertools import product

import pytest
import torch

from dsv4.caches.rows import RowFormat
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import attention as reference
from dsv4.ops.attention.prefill import sparse_attention
from tests.ops.attention.test_attention_decode_ptx import (
    BF16,
    ENTRIES,
    FP8,
    LISTED,
    RATIO,
    WIDTH,
    random_keys,
)
from tests.ops.cases import inv_freq
from tests.ops.executed import execute
from tests.ptx.faults import Deadlock, MissingFence
from tests.ptx.nvrtc import SourceEdit
from tests.ptx.schedule import SCHEDULES

# Of every head's values: weights, result and rotation are rounded to bf16.
ALLOWED = 5e-3
SOURCE, HOPPER = "attention_prefill.cu", "attention_prefill_sm90.cu"
FEW = "attention_prefill_few_sm90.cu"
# What is listed and is there: in the first tile and, behind one of nothing, in the third.
ENTRIES_LISTED = [entry for entry in LISTED if entry < ENTRIES]
SELECTED = [*ENTRIES_LISTED[:6], *[-1] * 100, *ENTRIES_LISTED[6:]]
# On what, at which position.
FAULTS = {
    "the sink is left out": (
        "sm_100a",
        0,
        SourceEdit(SOURCE, " + exp2_fast(sink_log2 - peaks[thread])", ""),
    ),
    "tiles are not awaited": ("sm_100a", 600, SourceEdit(SOURCE, "else cp_async_wait<0>();", "")),
    "sums keep their size": (
        "sm_100a",
        600,
        SourceEdit(SOURCE, "o[m][n][i] *= factor[m][i / 2]", ""),
    ),
    "scales of other groups": ("sm_100a", 0, SourceEdit(SOURCE, "scale[piece / 4]", "scale[0]")),
    "the window's first row is not dequantized": (
        "sm_90a",
        30,
        SourceEdit(
            SOURCE, "(int64)tokens + window - 1, last + 1", "(int64)tokens + window - 2, last"
        ),
    ),
    "Hopper: the first tile's rows are not awaited": (
        "sm_90a",
        600,
        SourceEdit(HOPPER, "barrier_wait_unlimited(arrived, 0);", ""),
    ),
    "Hopper: missing keys have weights": (
        "sm_90a",
        0,
        SourceEdit(HOPPER, "if (!mask.has(i / 2, i % 2, lane)) logit[i] = NO_LOGIT", ""),
    ),
    "Hopper: buffers are not released": (
        "sm_90a",
        600,
        SourceEdit(
            HOPPER, "if (count >= 2) barrier_wait(released + buffer * 8, count / 2 - 1 & 1);", ""
        ),
    ),
}


# Of the form for few heads, whose block takes two tokens of several tiles one after the other.
FAULTS_WITH_FEW_HEADS = {
    "keys are not awaited": SourceEdit(
        FEW, "barrier_wait_unlimited(arrived + wait.slot * 8, wait.round & 1);", ""
    ),
    "keys are read without a fence": SourceEdit(
        FEW, "            proxy_fence();\n            wgmma_fence();", "            wgmma_fence();"
    ),
    "weights are read without a fence": SourceEdit(
        FEW, "        proxy_fence();\n        consumers_meet();", "        consumers_meet();"
    ),
    "stages are not released": SourceEdit(
        FEW,
        "if (stage.round > 0) barrier_wait(released + stage.slot * 8, stage.round - 1 & 1);",
        "",
    ),
    "queries are replaced too early": SourceEdit(
        FEW,
        "if (block == 0 && walked > 0) barrier_wait(multiplied, walked - 1 & 1);",
        "",
    ),
    "missing keys have weights": SourceEdit(FEW, "s[i] = NO_LOGIT;", "s[i] = 0.0f;"),
    "results keep their size": SourceEdit(FEW, "o[block][i] *= factor[i / 4][i % 2];", ";"),
    "sums keep their size": SourceEdit(FEW, "sum[n][i] *= factor[n][i];", ""),
    "the maximum is never raised": SourceEdit(
        FEW, "consumers_any(token_starts || softmax", "consumers_any(token_starts && softmax"
    ),
    "results of the token before stay": SourceEdit(FEW, "step > 0 || !token_starts", "true"),
    "the sink is left out": SourceEdit(
        FEW, "float total = exp2_fast(sinks[head] - peak[n][i]);", "float total = 0.0f;"
    ),
    "the sums of other warps are left out": SourceEdit(
        FEW, "total += partial[other * HEADS + head];", "total += partial[head];"
    ),
    "entries of the tile before": SourceEdit(
        FEW, "entry[0] = ahead[0], entry[1] = ahead[1];", "entry[0] = ahead[0];"
    ),
}


def worst_error(
    architecture: str,
    format: RowFormat,
    listed: bool,
    heads: int,
    start: int,
    tokens: int,
    edit: SourceEdit | None = None,
    queries: float = 1.0,
    schedule: str = "late",
) -> float:
    """That of a head of a token, relative to its values; NaN where any is. ``queries``: how large
    they are.
    """
    generator = torch.Generator().manual_seed(heads + start)
    keys = random_keys(format, listed, start, tokens, max(ENTRIES, (start + tokens) // RATIO))
    q_THD = torch.randn(tokens, heads, WIDTH, generator=generator).bfloat16() * queries
    selected_TK = torch.tensor(SELECTED).clamp(min=-1).repeat(tokens, 1) if listed else None
    # Below every logit, and above most.
    sink_H = torch.linspace(-5, 20, heads)
    others = sink_H, start + torch.arange(tokens), inv_freq(RATIO)
    # One multiprocessor: Hopper's block takes token after token.
    recording = Recording(Target(torch.device("cpu"), architecture, 1), tokens)
    out_THD = sparse_attention(recording, q_THD, keys, selected_TK, *others)
    found = execute(recording, tokens, edit, SCHEDULES[schedule])(out_THD).double()
    expected = reference.sparse_attention(q_THD.float(), keys, selected_TK, *others)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("format", "listed", "heads", "start", "tokens"),
    [
        (BF16, True, 3, 77, 1),
        # The window fills up.
        (FP8, False, 3, 22, 3),
        # Fewer than 16 and than 32 heads, which Hopper takes as columns; lists with an empty tile.
        (FP8, True, 16, 600, 2),
        (BF16, False, 20, 600, 2),
        # A second group of heads; three tiles.
        (FP8, False, 65, 600, 1),
        # One key.
        (FP8, False, 64, 0, 1),
    ],
)
def test_equals_the_torch_op(
    architecture: str, format: RowFormat, listed: bool, heads: int, start: int, tokens: int
) -> None:
    assert worst_error(architecture, format, listed, heads, start, tokens) < ALLOWED


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    architecture, start, edit = FAULTS[fault]
    try:
        error = worst_error(architecture, FP8, False, 64, start, 1, edit)
    except MissingFence:
        return
    assert not error < ALLOWED


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heads", [16, 32])
def test_few_heads_in_any_order(heads: int, schedule: str) -> None:
    """Large logits, so that the maximum rises from tile to tile."""
    error = worst_error("sm_90a", FP8, True, heads, 600, 3, queries=300.0, schedule=schedule)
    assert error < ALLOWED


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS_WITH_FEW_HEADS)
def test_a_fault_with_few_heads_is_seen(fault: str) -> None:
    """With lists or without, small or large logits, whatever comes late."""
    edit = FAULTS_WITH_FEW_HEADS[fault]
    for schedule, listed, queries in product(SCHEDULES, (True, False), (1.0, 300.0)):
        try:
            error = worst_error("sm_90a", FP8, listed, 20, 600, 3, edit, queries, schedule)
        except (MissingFence, Deadlock):
            return
        if not error < ALLOWED:
            return
    raise AssertionError("all results are right")
