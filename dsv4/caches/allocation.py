"""The lengths and memory that a run configuration gives the caches."""

import torch

from dsv4.caches.layer import AttentionState, CompressedState, CompressorRing, KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.limits import MAX_DECODE_TOKENS

# Where the configuration leaves it open: what a CPU computes in about a second.
DEFAULT_PREFILL_CHUNK = 512
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def ring_slots(config: ModelConfig, engine: EngineConfig) -> int:
    """Slots of the window ring: the longest step plus the window before it, and room to undo a
    rejected draft.
    """
    return config.sliding_window + step_tokens(engine) + MAX_DECODE_TOKENS


def step_tokens(engine: EngineConfig) -> int:
    """Tokens of the longest step."""
    return max(chunk_tokens(engine), MAX_DECODE_TOKENS)


def chunk_tokens(engine: EngineConfig) -> int:
    """Tokens of a chunk of a prompt, whatever the context."""
    return DEFAULT_PREFILL_CHUNK if engine.prefill_chunk is None else engine.prefill_chunk


def prefill_tokens(engine: EngineConfig, max_context: int) -> int:
    """Tokens of the longest chunk that the context has room for."""
    return min(chunk_tokens(engine), max_context)


def layer_state_bytes(
    config: ModelConfig, engine: EngineConfig, max_context: int, ratio: int
) -> int:
    """Bytes ``DecodeState.allocate`` takes for one layer, computed without allocating."""
    meta = allocate_layer(config, engine, max_context, ratio, torch.device("meta"))
    parts = [part for part in (meta.compressed, meta.index) if part is not None]
    return meta.keys.ring.nbytes + sum(part.nbytes for part in parts)


def kv_row_format(engine: EngineConfig) -> RowFormat:
    """How key rows are stored."""
    return RowFormat.KV_FP8 if engine.kv_dtype == "fp8" else RowFormat.PLAIN


def allocate_layer(
    config: ModelConfig, engine: EngineConfig, max_context: int, ratio: int, device: torch.device
) -> AttentionState:
    """The caches of one layer with this ``ratio``; ``device`` may be torch's meta device."""
    dtype = COMPUTE_DTYPES[engine.compute_dtype]
    kv_format = kv_row_format(engine)
    index_format = (
        RowFormat.INDEX_FP8 if (engine.index_dtype or engine.kv_dtype) == "fp8" else RowFormat.PLAIN
    )
    width = config.head_dim
    rope_width = config.qk_rope_head_dim
    ring = RowCache.allocate(
        ring_slots(config, engine), width, rope_width, kv_format, dtype, device
    )
    compressed = None
    index = None
    if ratio:
        entries = max_context // ratio + 1
        overlap = 2 if ratio == CSA_RATIO else 1
        rows = RowCache.allocate(entries, width, rope_width, kv_format, dtype, device)
        compressed = CompressedState(CompressorRing.allocate(ratio, overlap * width, device), rows)
        if ratio == CSA_RATIO:
            keys = RowCache.allocate(
                entries, config.index_head_dim, rope_width, index_format, dtype, device
            )
            index = CompressedState(
                CompressorRing.allocate(ratio, overlap * config.index_head_dim, device), keys
            )
    key_set = KeySet(
        ring, None if compressed is None else compressed.rows, ratio, config.sliding_window
    )
    return AttentionState(key_set, compressed, index)
