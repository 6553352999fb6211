"""DecodeState: every persistent device buffer of one sequence, allocated once, with a byte table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dsv4.cache_rows import RowCache, RowFormat
from dsv4.config import CSA_RATIO, MAX_DECODE_TOKENS, MAX_TAKEN_BACK, EngineConfig, ModelConfig
from dsv4.hand_off import HandOff
from dsv4.layers.attention import AttentionState
from dsv4.ops.attention import KeySet
from dsv4.ops.compressor import CompressedState, CompressorRing

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class DecodeState:
    """Everything a step reads and writes besides weights. ``position_1`` int64 ``[1]``: tokens processed so far.

    One copy of the position lives on every device that owns layers (``positions_1``); the host never reads them
    inside a step, it keeps count in ``position``. Starting a new sequence means setting them to 0: every cache is
    addressed by absolute position and every read is masked by it, so nothing of the previous sequence can be seen.
    ``furthest`` is the largest position that this sequence has reached.
    """

    layers: tuple[AttentionState, ...]
    positions_1: dict[torch.device, Tensor]
    hand_offs: dict[tuple[torch.device, torch.device], HandOff]
    position: int = 0
    furthest: int = 0

    @classmethod
    def allocate(
        cls, config: ModelConfig, engine: EngineConfig, max_context: int, devices: tuple[torch.device, ...]
    ) -> "DecodeState":
        """``devices[l]`` owns layer l. Raises nothing; the memory plan has checked that it fits."""
        layers = tuple(
            _allocate_layer(config, engine, max_context, ratio, device)
            for ratio, device in zip(config.compress_ratios, devices, strict=True)
        )
        positions_1 = {device: torch.zeros(1, dtype=torch.int64, device=device) for device in dict.fromkeys(devices)}
        streams = (step_tokens(engine), config.hc_mult, config.hidden_size)
        # Two slots: a device can receive a chunk while it computes the one before.
        hand_offs = {
            pair: HandOff(*pair, streams, COMPUTE_DTYPES[engine.compute_dtype], slots=2)
            for pair in sorted(set(pairwise(devices)), key=str)
            if pair[0] != pair[1]
        }
        return cls(layers, positions_1, hand_offs)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(self.positions_1)

    def set_position(self, position: int) -> None:
        """Moves every device to ``position``: 0 starts a sequence, going back undoes tokens."""
        for position_1 in self.positions_1.values():
            position_1.fill_(position)
        self.position = position
        if position == 0:
            self.furthest = 0

    def advance(self, tokens: int) -> None:
        """Counts ``tokens`` that are queued on the devices."""
        self.position += tokens
        self.furthest = max(self.furthest, self.position)

    @property
    def undoable_tokens(self) -> int:
        """How many of the last tokens can be taken back: 8, or as far as the rings reach behind ``furthest``."""
        return min(MAX_DECODE_TOKENS, MAX_TAKEN_BACK - (self.furthest - self.position), self.position)

    def token_input(self, token_ids: Sequence[int]) -> Tensor:
        """int64 ``[T]`` on the host: what a step reads its tokens from. Pinned for several devices, so that the copies
        neither wait for them nor make them wait for each other.
        """
        return torch.tensor(token_ids, dtype=torch.int64, pin_memory=len(self.devices) > 1)

    def bring(self, streams_TME: Tensor, device: torch.device) -> Tensor:
        """The streams on ``device``."""
        if streams_TME.device == device:
            return streams_TME
        return self.hand_offs[streams_TME.device, device](streams_TME)

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
    return config.sliding_window + step_tokens(engine) + MAX_DECODE_TOKENS


def step_tokens(engine: EngineConfig) -> int:
    """Tokens of the longest step."""
    return max(engine.prefill_chunk, MAX_DECODE_TOKENS)


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
