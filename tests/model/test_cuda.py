"""The demo checkpoint on the CUDA op table against the torch ops on the CPU, and what a captured step needs."""

from typing import Any, Literal

import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.demo import CHECKPOINT
from dsv4.ops import op_table, swap_ops
from dsv4.validate.cosine import compare
from encoding.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

PROMPTS = (
    "What is the capital of France?",
    "Remember: the code of Nora is 4711. What is the code of Nora?",
    "3 + 4 =",
    "One sentence that is long enough to fill more than a window of tokens, " * 12,
)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


def engine(device: Literal["cpu", "cuda"], **settings: Any) -> Engine:
    return Engine.load(CHECKPOINT, EngineConfig(device=device, max_context=2048, **settings))


@pytest.fixture(scope="module")
def on_cpu() -> Engine:
    return engine("cpu")


@pytest.fixture(scope="module")
def on_gpu() -> Engine:
    return engine("cuda")


def test_the_cuda_table_is_what_a_gpu_gets(on_gpu: Engine) -> None:
    assert on_gpu.ops == op_table("cuda")


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda text: text[:12])
def test_greedy_ids_are_those_of_the_cpu(on_cpu: Engine, on_gpu: Engine, tokenizer: Tokenizer, prompt: str) -> None:
    ids = tokenizer.encode(prompt)
    assert list(on_gpu.generate(ids, 32, GREEDY)) == list(on_cpu.generate(ids, 32, GREEDY))


@pytest.mark.parametrize("chunk", [1, 4, 8, 9, 512])
def test_every_layer_agrees_with_the_torch_ops(on_cpu: Engine, tokenizer: Tokenizer, chunk: int) -> None:
    ids = tokenizer.encode(PROMPTS[-1])[:300]
    found = engine("cuda", prefill_chunk=chunk).trace(ids)
    rows = compare(found, on_cpu.trace(ids), [""] * on_cpu.config.num_hidden_layers)
    assert all(row.cosine >= 0.9999 for row in rows), "\n".join(map(str, rows))


def test_runs_are_bitwise_repeatable(on_gpu: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[-1])[:200]
    assert torch.equal(on_gpu.logits(ids), on_gpu.logits(ids))


@torch.inference_mode()
def test_a_step_does_not_synchronise_and_replays_bitwise(on_gpu: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[0])
    token_1 = torch.tensor([ids[-1]], device="cuda")
    on_gpu.reset()
    on_gpu.prefill(ids)

    def step() -> torch.Tensor:
        return on_gpu.model.head.logits(on_gpu.model(token_1, on_gpu.state))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    start = len(ids) + 2
    on_gpu.state.set_position(start)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(captured.clone())
    on_gpu.state.set_position(start)
    assert all(torch.equal(step(), expected) for expected in replayed)


@pytest.mark.parametrize("op", ["sparse_attention", "moe", "linear_rows", "hc_seam", "compress", "index_select"])
def test_swapping_one_op_for_its_reference_keeps_the_layers(on_cpu: Engine, tokenizer: Tokenizer, op: str) -> None:
    ids = tokenizer.encode(PROMPTS[-1])[:140]
    config = EngineConfig(device="cuda", max_context=2048)
    swapped = Engine.load(CHECKPOINT, config, wrap_ops=lambda table: swap_ops(table, {op: "torch"}))
    rows = compare(swapped.trace(ids), on_cpu.trace(ids), [""] * on_cpu.config.num_hidden_layers)
    assert all(row.cosine >= 0.9999 for row in rows), "\n".join(map(str, rows))
