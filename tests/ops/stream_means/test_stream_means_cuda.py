"""Means of streams on a GPU against the torch op."""

import pytest
import torch

from dsv4.ops import stream_means as reference
from dsv4.ops.immediate import immediately
from dsv4.ops.stream_means.cuda import stream_means

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 6, 139])
def test_means_are_those_of_the_torch_op(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (tokens, 4, 4096)
    taps = [
        torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(3)
    ]
    found = immediately(stream_means)(taps, tokens=tokens)
    assert torch.equal(found, reference.stream_means([tap.cpu() for tap in taps]).cuda())
