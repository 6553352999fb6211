"""What the plan calls work, against what is alive at the peak."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from dsv4 import Engine, EngineConfig, working_memory
from dsv4.checkpoint import Geometry, Layout, geometry_config, synthetic_weights, tiny_config, write_synthetic
from dsv4.config import ModelConfig
from dsv4.layers.weights import ReadOnce
from dsv4.ops import TableName, op_table
from dsv4.parameters import Parameter, Role
from dsv4.placement import Placement
from dsv4.quant import QuantFormat, quantize
from dsv4.working_memory import CUDA_RESERVE_BYTES, packing_bytes, step_bytes
from tests.live_bytes import LiveBytes

MIDDLE = tiny_config(
    hidden_size=512, num_attention_heads=16, head_dim=128, index_n_heads=8, index_topk=256, moe_intermediate_size=256
)


@pytest.mark.parametrize("format", list(QuantFormat), ids=lambda format: format.value)
@pytest.mark.parametrize("shape", [(512, 1024), (16, 256, 512)], ids=["matrix", "stack"])
@pytest.mark.parametrize("table", ["torch", "cuda"])
def test_packing_takes_what_is_planned_and_at_least_half(
    table: TableName, format: QuantFormat, shape: tuple[int, ...]
) -> None:
    if table == "cuda":
        pytest.importorskip("cuda.core")
    weight = quantize(torch.randn(shape).bfloat16().float(), format)
    pack_weight = op_table(table).pack_weight
    with LiveBytes() as live:
        packed = pack_weight(weight)
    kept = packed.nbytes if table == "torch" and format is not QuantFormat.F32 else 0
    role = Role.EXPERT if len(shape) == 3 else Role.LINEAR
    planned = packing_bytes(Parameter("x", shape, role), format, weight.nbytes, table)
    assert live.peak - kept <= planned
    # Indexing widens the codes inside the operator, where they are not seen.
    assert planned <= 2.5 * (live.peak - kept) or planned == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine_config",
    [
        EngineConfig(device="cpu", prefill_chunk=512, max_context=8000),
        EngineConfig(device="cpu", prefill_chunk=64, max_context=8000),
        EngineConfig(device="cpu", prefill_chunk=512, max_context=600, compute_dtype="float32", kv_dtype="bf16"),
    ],
    ids=["fp8", "small chunks", "float32"],
)
@pytest.mark.parametrize("raw", [tiny_config(), MIDDLE], ids=["tiny", "middle"])
def test_step_of_the_torch_ops_takes_what_is_planned_and_at_least_half(raw: dict, engine_config: EngineConfig) -> None:
    config = ModelConfig.from_dict({**raw, "max_position_embeddings": 8192})
    engine = synthetic_engine(config, engine_config, "bf16")
    with LiveBytes() as live:
        engine.prefill([5] * (engine_config.prefill_chunk + 20))
    planned = planned_step(engine, "torch")
    assert planned / 2 <= live.peak <= planned


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("geometry", "chunk", "max_context", "kv_dtype"),
    [
        ("v4-flash", 512, 8192, "fp8"),
        ("v4-flash", 4096, 1 << 16, "fp8"),
        ("v4-flash", 512, 1 << 18, "bf16"),
        ("v4-pro", 512, 8192, "fp8"),
        ("v4-pro", 2048, 1 << 20, "fp8"),
    ],
)
def test_step_of_the_cuda_ops_takes_what_is_planned_and_at_least_half(
    geometry: Geometry, chunk: int, max_context: int, kv_dtype: Literal["fp8", "bf16"]
) -> None:
    """Four layers of a published geometry, which hold every kind, with eight experts: weights do not matter here."""
    raw = geometry_config(geometry, 4)
    experts = {"n_routed_experts": 8, "num_hash_layers": 1, "vocab_size": 4096, "max_position_embeddings": 1 << 20}
    config = ModelConfig.from_dict({**raw, **experts})
    engine_config = EngineConfig(device="cuda", prefill_chunk=chunk, max_context=max_context, kv_dtype=kv_dtype)
    engine = synthetic_engine(config, engine_config, "nvfp4-experts")
    engine.prefill([5] * (chunk + 100))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.reset()
    engine.prefill([5] * (2 * chunk))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    planned = planned_step(engine, "cuda")
    print(f"\n{geometry} {chunk} {max_context} {kv_dtype}: peak {peak / 1e6:.1f} MB, planned {planned / 1e6:.1f} MB")
    assert planned / 2 <= peak <= planned


@pytest.mark.gpu
def test_loading_and_running_stay_within_the_plan_of_the_device(tmp_path: Path) -> None:
    """Driver, context and torch's own blocks included: what the device lost is at most what was planned."""
    raw = {**geometry_config("v4-flash", 4), "n_routed_experts": 64, "vocab_size": 4096}
    write_synthetic(tmp_path / "x", raw, "nvfp4-experts", 0)
    torch.cuda.empty_cache()
    config = EngineConfig(device="cuda", prefill_chunk=1024, max_context=1 << 15)
    (planned,) = Engine.plan(tmp_path / "x", config).devices
    before = torch.cuda.mem_get_info()[0]
    engine = Engine.load(tmp_path / "x", config)
    list(engine.generate([5] * 5000, 8))
    torch.cuda.synchronize()
    used = before - torch.cuda.mem_get_info()[0]
    print(f"\nused {used >> 20} MiB, planned {planned.total_bytes >> 20} MiB")
    assert used <= planned.total_bytes
    assert planned.total_bytes - CUDA_RESERVE_BYTES <= 1.5 * used


def test_limits_are_those_of_the_launchers() -> None:
    pytest.importorskip("cuda.core")
    from dsv4.ops import attention as torch_attention
    from dsv4.ops import indexer as torch_indexer
    from dsv4.ops.indexer import cuda as indexer
    from dsv4.ops.linear import prefill as prefill_linear
    from dsv4.ops.moe import prefill as moe_prefill

    assert working_memory.INDEX_SCORE_BYTES == indexer._SCORE_BYTES
    assert working_memory.MOE_WORKSPACE_BYTES == moe_prefill._WORKSPACE_BYTES
    assert working_memory.TILE_TOKENS == prefill_linear.TILE_TOKENS
    assert working_memory.TORCH_TILE_TOKENS == torch_attention._TILE_TOKENS
    assert working_memory.TORCH_TILE_BYTES == torch_attention._TILE_BYTES == torch_indexer._TILE_BYTES
    # A block of at most 160 multiprocessors leaves one partial sum.
    assert 160 * 4 * prefill_linear._PARTIAL_FLOATS <= working_memory.GEMM_PARTIAL_BYTES


def synthetic_engine(config: ModelConfig, engine_config: EngineConfig, layout: Layout) -> Engine:
    placement = Placement.of(engine_config, [1] * config.num_hidden_layers)
    weights = synthetic_weights(config, layout, 0, placement.device_of)
    return Engine(config, engine_config, ReadOnce(weights), placement)


def planned_step(engine: Engine, table: TableName) -> int:
    ratios = set(engine.config.compress_ratios)
    return max(step_bytes(engine.config, engine.engine_config, engine.max_context, ratio, table) for ratio in ratios)
