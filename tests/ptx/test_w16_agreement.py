"""``BlackwellW16`` in the machine against the CuTe DSL product of a Hopper GPU."""

import pytest
import torch

from dsv4.ops.immediate import immediately
from dsv4.ops.linear.prefill_cutedsl import CUTEDSL_TOKENS, INSTALLED, linear
from dsv4.ops.trees import map_tensors
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.w16_problems import FORMATS, W16Case, make_operands, make_weight, run
from tests.ptx.rounding import rounding
from tests.ptx.schedule import random_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")]


@pytest.mark.parametrize("format", FORMATS)
def test_at_most_one_in_a_thousand_values_is_rounded_apart(format: QuantFormat) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("HopperGemm runs on Hopper only")
    tokens = CUTEDSL_TOKENS + 3
    case = W16Case("dense", format, tokens, 192, 512, tile_tokens=128, exact=False)
    operands = make_operands(case)
    found = run(case, operands, random_schedule(0)).flatten(1)
    weight = make_weight(case, (192, 512), torch.Generator().manual_seed(0))
    x = operands.arguments[0].flatten(1)
    expected = immediately(linear)(*map_tensors([x, weight], lambda tensor: tensor.cuda()))
    share = rounding(found.view(torch.uint16).numpy(), expected.cpu().double().numpy())
    assert share.correct >= 0.999, share
    assert share.worst_ulps <= 1, share
