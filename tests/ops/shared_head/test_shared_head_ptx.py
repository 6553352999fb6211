"""Shares of a head, executed on the CPU: each device's columns, and no others."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import linear
from dsv4.ops.shared_head.cuda import fetch, logit_columns
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from dsv4.weights.shared_rows import rows_of
from tests.ops.cases import normal
from tests.ops.executed import execute
from tests.ops.linear.normal_weight import normal_weight
from tests.ptx.nvrtc import SourceEdit

pytestmark = pytest.mark.slow

ROWS = 272
WIDTH = 64
SHARES = ((0, 128), (128, ROWS))
FAULTS = {
    "columns of tokens follow each other by share": SourceEdit(
        "decode_products.cuh", "(output / TILE_ROWS) * rows", "(output / TILE_ROWS) * 128"
    ),
    "the last rows are not fetched": SourceEdit("fetch.cu", "at < count", "at + 1 < count"),
}


def logits(format: QuantFormat, tokens: int, edit: SourceEdit | None = None) -> Tensor:
    """Of both shares, the first of which fetches the hidden states."""
    whole = pack_weight(normal_weight(format, ROWS, WIDTH))
    hidden_TE = normal(tokens, WIDTH, seed=1).bfloat16()
    logits_TV = torch.full((tokens, ROWS), torch.nan)
    for (first, stop), fetches in zip(SHARES, (True, False), strict=True):
        recording = Recording(Target(torch.device("cpu"), "sm_90a", 2), tokens)
        given_TE = fetch(recording, hidden_TE) if fetches else hidden_TE
        logit_columns(recording, given_TE, rows_of(whole, first, stop), logits_TV, first)
        in_fetch = edit is not None and edit.file == "fetch.cu"
        execute(recording, tokens, edit if fetches or not in_fetch else None)
    return logits_TV


def is_right(format: QuantFormat, tokens: int, edit: SourceEdit | None = None) -> bool:
    found = logits(format, tokens, edit)
    hidden_TE = normal(tokens, WIDTH, seed=1).bfloat16()
    expected = linear(hidden_TE, normal_weight(format, ROWS, WIDTH), torch.float32)
    return torch.allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("format", "tokens"),
    [
        (QuantFormat.BF16, 1),
        (QuantFormat.BF16, 3),
        (QuantFormat.FP8_BLOCK128, 2),
        (QuantFormat.NVFP4, 8),
    ],
)
def test_the_logits_of_all_shares(format: QuantFormat, tokens: int) -> None:
    assert is_right(format, tokens)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    assert not is_right(QuantFormat.BF16, 3, FAULTS[fault])
