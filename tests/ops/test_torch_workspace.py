"""What the torch ops hold in a step, against what is alive at the peak."""

from typing import Any

import pytest

from dsv4 import Engine, EngineConfig
from dsv4.caches.allocation import COMPUTE_DTYPES, chunk_tokens, step_tokens
from dsv4.checkpoint import synthetic_weights, tiny_config
from dsv4.config import ModelConfig
from dsv4.layers.weights import ReadOnce
from dsv4.ops.torch_workspace import TorchStep
from dsv4.parallel.devices import engine_devices
from dsv4.parallel.placement import Placement
from tests.live_bytes import LiveBytes

MIDDLE = tiny_config(
    hidden_size=512,
    num_attention_heads=16,
    head_dim=128,
    index_n_heads=8,
    index_topk=256,
    moe_intermediate_size=256,
)


DENSE = tiny_config(
    compress_ratios=[128, 0, 0],
    num_hidden_layers=2,
    num_hash_layers=0,
    head_dim=512,
)


def planned_and_peak(raw: dict[str, Any], engine_config: EngineConfig) -> tuple[int, int]:
    """Bytes of a chunk's step: as planned, and the most that were alive."""
    config = ModelConfig.from_dict(raw)
    layer_bytes = [1] * config.num_hidden_layers
    placement = Placement.of(engine_config, engine_devices(engine_config), layer_bytes)
    weights = synthetic_weights(config, "bf16", 0, placement.device_of)
    engine = Engine(config, engine_config, ReadOnce(weights), placement)
    with LiveBytes() as live:
        engine.prefill([5] * (chunk_tokens(engine_config) + 20))
    itemsize = COMPUTE_DTYPES[engine_config.compute_dtype].itemsize
    tokens = min(step_tokens(engine_config), engine.max_context)
    planned = max(
        TorchStep(config, itemsize, tokens, engine.max_context, ratio).workspace
        for ratio in config.compress_ratios
    )
    return planned, live.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine_config",
    [
        EngineConfig(device="cpu", prefill_chunk=512, max_context=8000),
        EngineConfig(device="cpu", prefill_chunk=64, max_context=8000),
        EngineConfig(
            device="cpu",
            prefill_chunk=512,
            max_context=600,
            compute_dtype="float32",
            kv_dtype="bf16",
        ),
    ],
    ids=["fp8", "small chunks", "float32"],
)
@pytest.mark.parametrize("raw", [tiny_config(), MIDDLE], ids=["tiny", "middle"])
def test_a_step_takes_what_is_planned_and_at_least_half(
    raw: dict[str, Any], engine_config: EngineConfig
) -> None:
    """Found: 1.27 to 1.69 times the peak is planned."""
    planned, peak = planned_and_peak({**raw, "max_position_embeddings": 8192}, engine_config)
    assert planned / 2 <= peak <= planned


@pytest.mark.slow
def test_rows_that_are_dequantized_together_are_counted_whole() -> None:
    """They are nine tenths of a short step in a long context. Found: 1.15 times the peak."""
    planned, peak = planned_and_peak(
        DENSE, EngineConfig(device="cpu", prefill_chunk=8, max_context=1 << 18)
    )
    assert planned / 1.3 <= peak <= planned
