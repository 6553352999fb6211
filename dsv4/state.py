"""DecodeState: every persistent device buffer of one sequence, allocated once, with a byte table."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.config import CSA_RATIO, MAX_DECODE_TOKENS, EngineConfig, ModelConfig
from dsv4.layers.attention import AttentionState
from dsv4.ops.attention import KeySet
from dsv4.ops.compressor import CompressedState, CompressorRing

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class DecodeState:
    """Everything a step reads and writes besides weights. ``position_1`` int64 ``[1]``: tokens processed so far.

    One copy of the position lives on every device that owns layers (``positions_1``); the host never reads them
    inside a step. Starting a new sequence means setting them to 0: every cache is addressed by absolute position and
    every read is masked by it, so nothing of the previous sequence can be seen.
    """

    layers: tuple[AttentionState, ...]
    positions_1: dict[torch.device, Tensor]

    @classmethod
    def allocate(
        cls, config: ModelConfig, engine: EngineConfig, max_context: int, devices: tuple[torch.device, ...]
    ) -> "DecodeState":
        """``devices[l]`` owns layer l. Raises nothing; the memory plan has checked that it fits."""
        layers = tuple(
            _allocate_layer(config, engine, max_context, ratio, device)
            for ratio, device in zip(config.compress_ratios, devices, strict=True)
        )
        return cls(layers, {device: torch.zeros(1, dtype=torch.int64, device=device) for device in set(devices)})

    def set_position(self, position: int) -> None:
        """Moves every device to ``position``: 0 starts a sequence, going back up to 8 tokens undoes a rejected
        draft.
        """
        for position_1 in self.positions_1.values():
            position_1.fill_(position)

    @property
    def nbytes(self) -> int:
        return sum(size for *_, size in self.byte_table())

    def byte_table(self) -> Iterator[tuple[int, str, int]]:
        """(layer, buffer, bytes) of every buffer."""
        for index, layer in enumerate(self.layers):
            yield index, "window ring", layer.keys.ring.nbytes
            for name, part in (("compressed", layer.compressed), ("index", layer.index)):
                if part is not None:
                    yield index, f"{name} rows", part.rows.nbytes
                    yield index, f"{name} compressor ring", part.ring.nbytes


def ring_slots(config: ModelConfig, engine: EngineConfig) -> int:
    """Slots of the window ring: the longest step plus the window before it, and room to undo a rejected draft."""
    return config.sliding_window + max(engine.prefill_chunk, MAX_DECODE_TOKENS) + MAX_DECODE_TOKENS


def layer_state_bytes(config: ModelConfig, engine: EngineConfig, max_context: int, ratio: int) -> int:
    """Bytes ``DecodeState.allocate`` takes for one layer, computed without allocating."""
    meta = _allocate_layer(config, engine, max_context, ratio, torch.device("meta"))
    parts = [part for part in (meta.compressed, meta.index) if part is not None]
    return meta.keys.ring.nbytes + sum(part.nbytes for part in parts)


def _allocate_layer(
    config: ModelConfig, engine: EngineConfig, max_context: int, ratio: int, device: torch.device
) -> AttentionState:
    dtype = COMPUTE_DTYPES[engine.compute_dtype]
    kv_format = RowFormat.KV_FP8 if engine.kv_dtype == "fp8" else RowFormat.PLAIN
    index_format = RowFormat.INDEX_FP8 if (engine.index_dtype or engine.kv_dtype) == "fp8" else RowFormat.PLAIN
    width, rope_width = config.head_dim, config.qk_rope_head_dim
    ring = RowCache.allocate(ring_slots(config, engine), width, rope_width, kv_format, dtype, device)
    compressed = index = None
    if ratio:
        entries = max_context // ratio + 1
        overlap = 2 if ratio == CSA_RATIO else 1
        rows = RowCache.allocate(entries, width, rope_width, kv_format, dtype, device)
        compressed = CompressedState(CompressorRing.allocate(ratio, overlap * width, device), rows)
        if ratio == CSA_RATIO:
            keys = RowCache.allocate(entries, config.index_head_dim, rope_width, index_format, dtype, device)
            index = CompressedState(CompressorRing.allocate(ratio, overlap * config.index_head_dim, device), keys)
    key_set = KeySet(ring, None if compressed is None else compressed.rows, ratio, config.sliding_window)
    return AttentionState(key_set, compressed, index)
