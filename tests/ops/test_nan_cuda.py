"""Kernels that compare tell the host of NaN by a word of pinned memory, and of nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4.caches.rows import RowCache, RowFormat
from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.indexer import decode as indexer_decode
from dsv4.ops.indexer import prefill as indexer_prefill
from dsv4.ops.moe import decode as moe_decode
from dsv4.ops.router import Router
from dsv4.ops.router import prefill as router_prefill
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantTensor
from tests.ops.cases import normal
from tests.ops.moe.routes import on_zero_experts

pytestmark = pytest.mark.gpu

TOPK = 64
SLOTS = 300


@pytest.fixture(autouse=True)
def on_cuda() -> Any:
    with torch.device("cuda"):
        yield


def met_nan(op: Callable[..., Any], *arguments: Any, tokens: int) -> bool:
    """Whether the host is told of NaN when ``op`` runs."""
    nan_1 = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    recording = Recording(Target.of(torch.device("cuda", 0)), tokens, nan_1)
    op(recording, *arguments)
    program = Program(recording)
    program.run(tokens)
    torch.cuda.synchronize()
    return bool(nan_1)


@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize(
    ("heads", "format", "dtype"),
    [
        (64, RowFormat.INDEX_FP8, torch.bfloat16),
        (64, RowFormat.PLAIN, torch.bfloat16),
        (4, RowFormat.INDEX_FP8, torch.bfloat16),
        (4, RowFormat.PLAIN, torch.float32),
    ],
    ids=["fp8", "bf16", "any fp8", "any f32"],
)
def test_index_scores(tokens: int, heads: int, format: RowFormat, dtype: torch.dtype) -> None:
    form = indexer_decode if tokens <= 8 else indexer_prefill
    last = 4 * SLOTS - 41
    visible = (last + 1) // 4

    def noticed(broken: str, index: int) -> bool:
        q_TID = normal(tokens, heads, 128, seed=1, dtype=torch.bfloat16)
        weight_TI = normal(tokens, heads, seed=2)
        rows_SD = normal(SLOTS, 128, seed=3)
        for name, tensor in (("q", q_TID), ("weights", weight_TI), ("keys", rows_SD)):
            if name == broken:
                tensor[index, 0] = math.nan
        keys = RowCache.allocate(SLOTS, 128, 64, format, dtype, torch.device("cuda"))
        keys.write(torch.arange(SLOTS), rows_SD)
        positions_T = torch.arange(last + 1 - tokens, last + 1)
        arguments = (q_TID, weight_TI, 0.5, keys, positions_T, TOPK)
        return met_nan(form.index_select, *arguments, tokens=tokens)

    assert not noticed("nothing", 0)
    assert noticed("q", tokens - 1)
    assert noticed("weights", 0)
    assert noticed("keys", 0)
    assert noticed("keys", visible - 1)
    assert not noticed("keys", visible)


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 100])
@pytest.mark.parametrize("hashed", [False, True], ids=["learned", "hashed"])
@pytest.mark.parametrize(("width", "count"), [(4096, 256), (72, 37)], ids=["flash", "odd"])
def test_router(tokens: int, hashed: bool, width: int, count: int) -> None:
    def noticed(broken: str, index: int) -> bool:
        x_TE = normal(tokens, width, seed=1, dtype=torch.bfloat16)
        gate_XE = normal(count, width, seed=2, dtype=torch.bfloat16, scale=width**-0.5)
        for name, tensor in (("x", x_TE), ("gate", gate_XE)):
            if name == broken:
                tensor[index, 0] = math.nan
        table_VP = torch.arange(4).expand(10, 4).contiguous()
        selection = table_VP if hashed else normal(count, seed=3)
        router = Router(pack_weight(QuantTensor.dense(gate_XE)), selection, hashed, 4, 1.5)
        tokens_T = torch.zeros(tokens, dtype=torch.int64)
        if tokens <= 8:
            arguments = on_zero_experts(x_TE, tokens_T, router)
            return met_nan(moe_decode.moe, *arguments, tokens=tokens)
        return met_nan(router_prefill.route, x_TE, tokens_T, router, tokens=tokens)

    assert not noticed("nothing", 0)
    assert noticed("x", tokens - 1)
    assert noticed("gate", 3)
    # An expert that the table does not list is not compared with others.
    assert noticed("gate", count - 1) is not hashed
