"""Hidden rows of the shared expert in a prompt, executed on the CPU, with K whole and split among
blocks, against float64.
"""

import pytest
import torch
from torch.nn.functional import silu

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.moe.grouped import gate_up
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.cases import normal
from tests.ops.executed import execute
from tests.ptx.schedule import SCHEDULES

pytestmark = pytest.mark.slow

COLUMNS = 832
LIMIT = 1.0
# By multiprocessors for one tile: 13 stages make up to three parts.
SPLITS = {1: 1, 2: 2, 3: 3}


def assert_exact(
    architecture: str,
    format: QuantFormat,
    tokens: int,
    multiprocessors: int,
    schedule: str = "random",
) -> None:
    """Of 40 rows, which are no whole block; other tokens are not written."""
    weights = [weight_of(format, seed) for seed in (1, 2)]
    recording = Recording(Target(torch.device("cpu"), architecture, multiprocessors), tokens + 5)
    x_TE = normal(tokens + 5, COLUMNS, seed=3, dtype=torch.bfloat16) / 32
    hidden = gate_up(recording, x_TE, *map(pack_weight, weights), limit=LIMIT)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    shape = launch.shape_for(tokens, dense=False)
    assert shape is not None
    assert shape.numbers["splits"] == shape.grid[0] == SPLITS[multiprocessors]
    found = execute(recording, tokens, schedule=SCHEDULES[schedule])(hidden)
    gate, up = (x_TE[:tokens].double() @ weight.dequantize().double().T for weight in weights)
    exact = silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    torch.testing.assert_close(found[:tokens].double(), exact, rtol=2**-8, atol=1e-5)
    assert found[tokens:].isnan().all()


def weight_of(format: QuantFormat, seed: int) -> QuantTensor:
    values = normal(40, COLUMNS, seed=seed)
    if format is QuantFormat.BF16:
        return QuantTensor.dense(values.bfloat16())
    return quantize(values, format)


@pytest.mark.parametrize(
    ("architecture", "format", "multiprocessors"),
    [
        ("sm_90a", QuantFormat.FP8_BLOCK128, 3),
        ("sm_90a", QuantFormat.NVFP4, 2),
        ("sm_100a", QuantFormat.BF16, 1),
        ("sm_100a", QuantFormat.MXFP4, 3),
    ],
)
def test_parts_of_k_are_added_up(
    architecture: str, format: QuantFormat, multiprocessors: int
) -> None:
    """Of two and a half times eight tokens, which no number of splits divides."""
    assert_exact(architecture, format, 20, multiprocessors)


@pytest.mark.parametrize("schedule", ["late", "priority early", "short turns"])
def test_blocks_may_come_in_any_order(schedule: str) -> None:
    assert_exact("sm_90a", QuantFormat.BF16, 12, 3, schedule=schedule)
