"""The Markov head on a GPU against the torch op."""

import pytest
import torch

from dsv4.ops import markov as reference
from dsv4.ops.immediate import immediately
from dsv4.ops.markov.cuda import markov_logits
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantTensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [89, 129_280])
def test_logits_are_those_of_the_torch_op(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    w1_VR, w2_VR = (
        torch.randn((vocabulary, 256), generator=generator, device="cuda").to(torch.bfloat16)
        for _ in range(2)
    )
    base_V = torch.randn(vocabulary, generator=generator, device="cuda")
    for token, read in ((7, 7), (-1, 0)):
        previous_1 = torch.tensor([token], device="cuda")
        packed = pack_weight(QuantTensor.dense(w2_VR))
        table = w1_VR.to(dtype)
        found = immediately(markov_logits)(base_V, previous_1, table, packed, tokens=1)
        exact_1 = torch.tensor([read], device="cuda")
        w2 = QuantTensor.dense(w2_VR)
        expected = reference.markov_logits(base_V, exact_1, w1_VR, w2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
