"""Ops that compare notice NaN: the torch functions, and what launchers give to their kernels."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.ops import TORCH, Ops, noticing_nan
from dsv4.ops.indexer import decode as indexer_decode
from dsv4.ops.indexer import prefill as indexer_prefill
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe import decode as moe_decode
from dsv4.ops.moe import prefill as moe_prefill
from dsv4.ops.router import Router
from dsv4.weights.quant import QuantTensor
from tests.ops.cases import normal, positions
from tests.ops.indexer.meta import selection
from tests.ops.indexer.test_indexer import WIDTH, key_cache
from tests.ops.moe.meta_layer import FLASH, step
from tests.ops.recorded import HOPPER, meta

LIMIT = 10.0


@pytest.fixture
def nan_1() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def select(ops: Ops, broken: str, index: int) -> None:
    """Two tokens, which see 9 and 12 of 14 entries; ``index`` of a tensor's first place is NaN."""
    tensors = {
        "q": normal(2, 4, WIDTH, seed=1),
        "weights": normal(2, 4, seed=2),
        "keys": normal(14, WIDTH, seed=3),
    }
    if broken in tensors:
        tensors[broken][index, 0] = math.nan
    keys = key_cache(tensors["keys"])
    ops.index_select(tensors["q"], tensors["weights"], 1.0, keys, positions(36, 48), 5)


@pytest.mark.parametrize(
    ("broken", "index", "noticed"),
    [
        ("nothing", 0, False),
        ("q", 0, True),
        ("weights", 1, True),
        ("keys", 11, True),
        ("keys", 12, False),
    ],
)
def test_nan_among_visible_scores_is_noticed(
    nan_1: Tensor, broken: str, index: int, noticed: bool
) -> None:
    select(noticing_nan(TORCH, nan_1), broken, index)
    assert nan_1.tolist() == [int(noticed)]


@pytest.mark.parametrize("hashed", [False, True], ids=["learned", "hashed"])
@pytest.mark.parametrize(
    ("broken", "noticed"), [(None, False), ("x", True), ("gate", True), ("experts", False)]
)
def test_nan_among_the_weights_of_a_router_is_noticed(
    nan_1: Tensor, hashed: bool, broken: str | None, noticed: bool
) -> None:
    x_TE = normal(3, 64, seed=1)
    gate_XE = normal(4, 64, seed=2)
    inner_XFE = normal(4, 32, 64, seed=3)
    for name, tensor in (("x", x_TE), ("gate", gate_XE), ("experts", inner_XFE)):
        if name == broken:
            tensor[2, 0] = math.nan
    table_VP = torch.tensor([[0, 1], [1, 2], [2, 3]])
    router = Router(
        QuantTensor.dense(gate_XE), table_VP if hashed else normal(4, seed=4), hashed, 2, 1.0
    )
    inner, outer = QuantTensor.dense(inner_XFE), QuantTensor.dense(normal(4, 64, 32, seed=5))
    experts = ExpertWeights(inner, outer, inner)
    shared = ExpertWeights(inner[0], outer[0], inner[0])
    ops = noticing_nan(TORCH, nan_1)
    ops.moe(x_TE, torch.arange(3), router, experts, shared, LIMIT)
    assert nan_1.tolist() == [int(noticed)]


def test_what_is_noticed_stays_until_the_host_forgets_it(nan_1: Tensor) -> None:
    ops = noticing_nan(TORCH, nan_1)
    select(ops, "q", 0)
    select(ops, "nothing", 0)
    assert nan_1.tolist() == [1]


def test_ops_in_the_place_of_torch_functions_stay_as_they_are(nan_1: Tensor) -> None:
    def moe(*arguments: Any) -> Mixture:
        return TORCH.moe(*arguments)

    ops = noticing_nan(replace(TORCH, moe=moe), nan_1)
    assert ops.moe is moe
    assert ops.index_select is not TORCH.index_select


def index_launches(module: Any, tokens: int) -> Callable[[Recording], object]:
    return lambda recording: module.index_select(recording, *selection(tokens, 2049))


def moe_launches(module: Any) -> Callable[[Recording], object]:
    return lambda recording: module.moe(
        recording, *step(recording, FLASH), FLASH.router(), *FLASH.weights(), LIMIT
    )


@pytest.mark.parametrize(
    ("record", "tokens", "kernel"),
    [
        (index_launches(indexer_decode, 2), 2, "index_scores"),
        (index_launches(indexer_prefill, 40), 40, "index_scores"),
        (index_launches(indexer_prefill, 100), 100, "index_scores_sm90"),
        (moe_launches(moe_decode), 2, "moe_decode"),
        (moe_launches(moe_prefill), 100, "router_select"),
    ],
)
def test_kernels_that_compare_get_the_word_of_the_recording(
    record: Callable[[Recording], object], tokens: int, kernel: str
) -> None:
    nan_1 = meta(1, dtype=torch.int32)
    for word in (nan_1, None):
        recording = Recording(HOPPER, tokens, word)
        record(recording)
        launches = [item for item in recording.items if isinstance(item, Launch)]
        words = {
            launch.shape.kernel.function: launch.arguments["nan"]
            for launch in launches
            if "nan" in launch.arguments
        }
        assert list(words) == [kernel]
        assert words[kernel] is word
