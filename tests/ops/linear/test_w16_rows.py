"""Rows of sorted and gated products with 16-bit activations depend on nothing but themselves."""

import pytest
import torch

from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from tests.ops.linear.meta import MXFP4, NVFP4
from tests.ops.linear.w16_problems import PER_TOKEN, W16Case, make_operands, run
from tests.ptx.schedule import random_schedule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl"),
]
CASES = {
    "gate_up": W16Case("gate_up", MXFP4, 20, 72, 192, exact=False),
    "down": W16Case("down", NVFP4, 20, 136, 192, torch.float32, exact=False),
    "shared": W16Case("shared", NVFP4, 30, 72, 192, exact=False),
}
# Of the arguments of a kernel.
TILES = 7
COUNT = 8
SLOTS = 9


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", CASES)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    """Every third row of tokens is another, and every tile is two, in the opposite order."""
    case = CASES[form]
    given = make_operands(case)
    together = run(case, given, random_schedule(1)).clone()
    arguments = list(given.arguments)
    x = arguments[0].clone()
    x[::3] = torch.randn(x[::3].shape, generator=torch.Generator().manual_seed(9)).to(x.dtype)
    same = torch.arange(len(together)) % 3 != 0
    if case.sorted:
        count = int(arguments[COUNT])
        halves = []
        for expert, first, pairs, _ in arguments[TILES][:count].tolist():
            half = pairs // 2
            halves += [[expert, first, half, 0], [expert, first + half, pairs - half, 0]]
        arguments[TILES] = torch.tensor(halves[::-1], dtype=torch.int32)
        arguments[COUNT] = torch.tensor([len(halves)], dtype=torch.int32)
        slots = arguments[SLOTS].long()
        if form == "gate_up":
            same = slots // PER_TOKEN % 3 != 0
        else:
            used = slots < len(same)
            same = torch.zeros(len(together), dtype=torch.bool)
            same[slots[used]] = torch.arange(len(slots))[used] % 3 != 0
    given.y.fill_(torch.nan)
    arguments[0] = x
    again = run(case, given._replace(arguments=arguments), random_schedule(2))
    assert int(same.sum()) > len(same) // 3
    assert torch.equal(again[same].nan_to_num(-1), together[same].nan_to_num(-1))
    assert not torch.equal(again.nan_to_num(-1), together.nan_to_num(-1))
