"""Reported faults of captured and padded launches: rows J of docs/regressions.md."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowFormat
from dsv4.launch.recording import Recording
from dsv4.ops import TORCH
from dsv4.ops.hyper_connection import HcWeights
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.router import Router
from dsv4.ops.tables import CUDA_TABLE
from dsv4.ops.trees import tensors_in
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat
from dsv4.weights.quantize import quantize
from tests.ops.cases import EPS, HEAD_DIM, WINDOW, integers, inv_freq, normal
from tests.ops.gpu import poison
from tests.ops.test_known_faults import HEADS, WIDTH, rows_of, whole_number_queries

pytestmark = pytest.mark.gpu

# The chunk that a step is recorded for, and the tokens that it has.
CHUNK = 40
TOKENS = 13


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


def recorded(name: str) -> Callable[..., Any]:
    """An op of the CUDA table, in the form for the recording's number of tokens."""

    def op(recording: Recording, *arguments: Any) -> Any:
        return getattr(CUDA_TABLE.on(recording), name)(*arguments)

    return op


def captured(op: PreparedOp) -> torch.cuda.CUDAGraph:
    """A graph of one run, which writes ``op.result``; the memory of the run is that of ``op``."""
    op.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run()
    return graph


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_spec11_j61_a_selection_captured_at_a_short_context_scores_a_long_one(
    tokens: int,
) -> None:
    """Captured where every entry is listed unseen; whole numbers make all scores exact."""
    slots = 40_000
    values_SD = integers(-2, 2, slots, WIDTH, seed=1)
    values_SD[:, 0] = 0
    weight_TI = integers(-3, 3, tokens, HEADS, seed=2)
    position_T = 100 + torch.arange(tokens)
    keys = rows_of(values_SD, RowFormat.PLAIN)
    arguments = whole_number_queries(tokens), weight_TI, 0.5, keys, position_T, 512
    op = PreparedOp(recorded("index_select"), *arguments)
    graph = captured(op)
    for start in (100, 2040, 33_000, 4 * slots - tokens, 100):
        position_T.copy_(start + torch.arange(tokens))
        graph.replay()
        expected_TK = TORCH.index_select(*arguments)
        found_TK = op.result.sort(dim=1).values
        assert torch.equal(found_TK, expected_TK.sort(dim=1).values), start


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_spec11_j61_attention_captured_at_a_short_context_reads_a_long_one(
    ratio: int, tokens: int
) -> None:
    entries = 4200
    ring = rows_of(normal(WINDOW + tokens + 8, HEAD_DIM, seed=3), RowFormat.KV_FP8)
    keys = KeySet(ring, rows_of(normal(entries, HEAD_DIM, seed=4), RowFormat.KV_FP8), ratio, WINDOW)
    selected_TK = torch.full((tokens, 512), -1) if ratio == 4 else None
    position_T = 2 + torch.arange(tokens)
    q_THD = normal(tokens, 4, HEAD_DIM, seed=5, dtype=torch.bfloat16)
    arguments = q_THD, keys, selected_TK, normal(4, seed=6), position_T, inv_freq(ratio)
    op = PreparedOp(recorded("sparse_attention"), *arguments)
    graph = captured(op)
    for start in (2, 600, 4096, ratio * entries - tokens, 2):
        position_T.copy_(start + torch.arange(tokens))
        if selected_TK is not None:
            visible = min(512, (start + 1) // ratio)
            selected_TK.fill_(-1)[:, :visible] = torch.arange(visible)
        graph.replay()
        expected_THD = immediately(recorded("sparse_attention"))(*arguments)
        assert torch.equal(op.result, expected_THD), start


def packed(*shape: int, seed: int, format: QuantFormat = QuantFormat.NVFP4) -> PackedWeight:
    return pack_weight(quantize(normal(*shape, seed=seed, scale=0.1), format))


def in_tokens(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return normal(CHUNK, *shape, seed=seed, dtype=dtype)


def products() -> dict[str, tuple[Any, ...]]:
    """Arguments by op."""
    return {
        "linear": (in_tokens(256, seed=1), packed(192, 256, seed=2)),
        "grouped_linear": (in_tokens(2, 128, seed=3), packed(128, 128, seed=4)),
    }


def seams() -> dict[str, tuple[Any, ...]]:
    """Arguments by op, of 4 streams of 256."""
    fn = normal(24, 4 * 256, seed=5, scale=0.03)
    weights = HcWeights(fn, normal(24, seed=6), torch.tensor([0.9, 1.1, 0.5]), EPS, EPS, 20)
    streams_TME = in_tokens(4, 256, seed=7)
    mixing = (in_tokens(4, seed=8, dtype=torch.float32).sigmoid(),)
    mixing += (in_tokens(4, 4, seed=9, dtype=torch.float32).softmax(1),)
    y_TE = in_tokens(256, seed=10)
    norm_weight = normal(256, seed=11)
    return {
        "hc_pre": (streams_TME, weights, norm_weight),
        "hc_seam": (y_TE, streams_TME, *mixing, weights, norm_weight),
        "hc_post": (y_TE, streams_TME, *mixing),
    }


def experts() -> dict[str, tuple[Any, ...]]:
    """Arguments by op, learned and hashed."""
    shapes = ((8, 64, 256), (8, 256, 64), (8, 64, 256))
    routed = ExpertWeights(*(packed(*shape, seed=12 + i) for i, shape in enumerate(shapes)))
    shared = ExpertWeights(*(packed(*shape[1:], seed=15 + i) for i, shape in enumerate(shapes)))
    gate = packed(8, 256, seed=18, format=QuantFormat.BF16)
    table_VP = torch.arange(8).repeat(5, 1)[:, :3].contiguous()
    routers = {
        "moe": Router(gate, normal(8, seed=19), False, 3, 1.5),
        "moe hashed": Router(gate, table_VP, True, 3, 1.5),
    }
    x_TE = in_tokens(256, seed=20)
    tokens_T = torch.arange(CHUNK) % 5
    return {
        name: (x_TE, tokens_T, router, routed, shared, 10.0) for name, router in routers.items()
    }


def lists_and_keys() -> dict[str, tuple[Any, ...]]:
    """Arguments by op, of a chunk behind 200 tokens."""
    position_T = 200 + torch.arange(CHUNK)
    index_keys = rows_of(normal(60, WIDTH, seed=21), RowFormat.INDEX_FP8)
    queries = in_tokens(HEADS, WIDTH, seed=22), in_tokens(HEADS, seed=23, dtype=torch.float32)
    ring = rows_of(normal(WINDOW + CHUNK + 8, HEAD_DIM, seed=24), RowFormat.KV_FP8)
    compressed = rows_of(normal(60, HEAD_DIM, seed=25), RowFormat.KV_FP8)
    selected_TK = torch.arange(50).repeat(CHUNK, 1)
    q_THD = in_tokens(4, HEAD_DIM, seed=26)
    keys = KeySet(ring, compressed, 4, WINDOW)
    return {
        "index_select": (*queries, 0.5, index_keys, position_T, 16),
        "sparse_attention": (
            *(q_THD, keys, selected_TK, normal(4, seed=27), position_T, inv_freq(4)),
        ),
    }


PADDED = ["linear", "grouped_linear", "hc_pre", "hc_seam", "hc_post"]
PADDED += ["moe", "moe hashed", "index_select", "sparse_attention"]


@pytest.mark.parametrize("name", PADDED)
def test_spec11_j73_what_lies_behind_the_tokens_of_a_chunk_changes_no_bit(name: str) -> None:
    """Rows of NaN, ids of −1 and a workspace of NaN behind 13 of 40 tokens."""
    arguments = {**products(), **seams(), **experts(), **lists_and_keys()}[name]
    op = PreparedOp(recorded(name.removesuffix(" hashed")), *arguments)
    expected = [result[:TOKENS].clone() for result in tensors_in(op.run(TOKENS))]
    for argument in arguments:
        if not isinstance(argument, Tensor) or argument.shape[0] != CHUNK:
            continue
        if argument.is_floating_point():
            argument[TOKENS:] = torch.nan
        elif argument.dim() == 1 and name.startswith("moe"):
            argument[TOKENS:] = -1
    op.program._memory.bytes.fill_(0xFF)
    poison(1 << 20)
    for found, exact in zip(tensors_in(op.run(TOKENS)), expected, strict=True):
        assert torch.equal(found[:TOKENS].view(torch.uint8), exact.view(torch.uint8))
