"""The Markov and confidence heads against their formulas."""

import torch

from dsv4.ops.markov import confidence, markov_logits
from dsv4.weights.quant import QuantTensor
from tests.ops.cases import normal


def test_logits_are_changed_by_the_token_before() -> None:
    w1_VR = normal(11, 3, seed=1, dtype=torch.bfloat16)
    w2_VR = normal(11, 3, seed=2, dtype=torch.bfloat16)
    base_V = normal(11, seed=3)
    for previous in (0, 7, 10):
        read = (torch.tensor([previous]), w1_VR, QuantTensor.dense(w2_VR))
        found = markov_logits(base_V, *read)
        assert found.dtype == torch.float32
        exact = base_V.double() + w2_VR.double() @ w1_VR[previous].double()
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_confidence_reads_the_streams_then_the_token_before() -> None:
    w1_VR = normal(11, 3, seed=1, dtype=torch.bfloat16)
    proj = normal(1, 8, seed=2, dtype=torch.bfloat16)
    z_E = normal(5, seed=3, dtype=torch.bfloat16)
    found = confidence(z_E, torch.tensor([4]), w1_VR, QuantTensor.dense(proj))
    exact = proj[0, :5].double() @ z_E.double() + proj[0, 5:].double() @ w1_VR[4].double()
    assert (found.dtype, found.dim()) == (torch.float32, 0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
