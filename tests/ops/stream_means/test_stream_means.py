"""stream_means: plain means, taps side by side in their order, one rounding."""

import pytest
import torch

from dsv4.ops.stream_means import stream_means
from tests.ops.cases import normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_of_every_tap_side_by_side(dtype: torch.dtype) -> None:
    taps = [normal(3, 4, 8, seed=seed, dtype=dtype) for seed in (1, 2)]
    found = stream_means(taps)
    assert (found.dtype, tuple(found.shape)) == (dtype, (3, 16))
    for tap, streams_TME in enumerate(taps):
        for token in range(3):
            exact = streams_TME[token].double().sum(0) / 4
            part = found[token, 8 * tap : 8 * tap + 8]
            torch.testing.assert_close(part.double(), exact.to(dtype).double(), rtol=1e-6, atol=0)


def test_streams_that_cancel_are_summed_before_they_are_rounded() -> None:
    streams_TME = torch.tensor([[[256.0], [1.0], [-256.0], [1.0]]], dtype=torch.bfloat16)
    assert stream_means([streams_TME]).item() == 0.5
