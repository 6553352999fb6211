"""Shares of a head on one GPU, and across two of them."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import linear
from dsv4.ops.shared_head.cuda import fetch, logit_columns
from dsv4.parallel.peer_memory import allow_peer_access, shared_memory
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from dsv4.weights.shared_rows import on_device, rows_of
from tests.gpu_counts import gpu_counts
from tests.ops.linear.normal_weight import normal_weight

pytestmark = pytest.mark.gpu

ROWS = 4112
WIDTH = 1024
SPLIT = 1920


def logits(devices: list[torch.device], hidden_TE: Tensor, format: QuantFormat) -> Tensor:
    """Of two shares, the second on the last device, which has the hidden states and the logits."""
    home = devices[-1]
    whole = on_device(pack_weight(normal_weight(format, ROWS, WIDTH)), home)
    tokens = hidden_TE.shape[0]
    shared_TE = shared_memory((tokens, WIDTH), torch.bfloat16, home)
    shared_TE.copy_(hidden_TE)
    logits_TV = shared_memory((tokens, ROWS), torch.float32, home)
    logits_TV.fill_(torch.nan)
    torch.cuda.synchronize(home)
    for device, first, stop in ((devices[0], 0, SPLIT), (home, SPLIT, ROWS)):
        recording = Recording(Target.of(device), tokens)
        given_TE = fetch(recording, shared_TE)
        rows = on_device(rows_of(whole, first, stop), device)
        logit_columns(recording, given_TE, rows, logits_TV, first)
        with torch.cuda.device(device):
            Program(recording).run(tokens)
            torch.cuda.synchronize(device)
    return logits_TV


@pytest.mark.parametrize("gpus", gpu_counts(1, 2))
@pytest.mark.parametrize("format", [QuantFormat.BF16, QuantFormat.FP8_BLOCK128, QuantFormat.NVFP4])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_the_logits_of_all_shares(gpus: int, format: QuantFormat, tokens: int) -> None:
    devices = [torch.device("cuda", index) for index in range(gpus)]
    if gpus > 1:
        allow_peer_access(devices)
    generator = torch.Generator().manual_seed(tokens)
    hidden_TE = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    found = logits(devices, hidden_TE, format).cpu()
    expected = linear(hidden_TE, normal_weight(format, ROWS, WIDTH), torch.float32)
    bound = 64 * 2.0**-24 * float(expected.abs().max())
    assert torch.allclose(found, expected, rtol=0, atol=bound)
