"""Attention of layers without memory, for recordings that nothing runs."""

import dataclasses

import torch

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.launch.items import Launch
from dsv4.launch.target import Target
from dsv4.ops.attention import decode, prefill
from tests.ops.forms import by_tokens
from tests.ops.recorded import HOPPER, launches, meta

HEADS = {"Flash": 64, "Pro": 128}
LISTED = {"Flash": 512, "Pro": 1024}
WINDOW = 128
CSA = 4
HCA = 128
FORMATS = [RowFormat.KV_FP8, RowFormat.PLAIN]


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one call, but for the number of tokens."""

    heads: int = 64
    ratio: int = CSA
    listed: int | None = None
    entries: int = 2050
    format: RowFormat = RowFormat.KV_FP8
    width: int = 512
    rope_width: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = WINDOW

    def rows(self, slots: int) -> RowCache:
        shape = (self.width, self.rope_width, self.format, self.dtype)
        return RowCache.allocate(slots, *shape, torch.device("meta"))

    def arguments(self, tokens: int) -> tuple[object, ...]:
        compressed = self.rows(self.entries) if self.ratio else None
        keys = KeySet(self.rows(self.window + 2048 + 11), compressed, self.ratio, self.window)
        selected_TK = None
        if self.listed is not None:
            selected_TK = meta(tokens, self.listed, dtype=torch.int64)
        return (
            meta(tokens, self.heads, self.width),
            keys,
            selected_TK,
            meta(self.heads, dtype=torch.float32),
            meta(tokens, dtype=torch.int64),
            meta(self.rope_width // 2, dtype=torch.float32),
        )

    def record(self, tokens: int, target: Target = HOPPER) -> list[Launch]:
        op = by_tokens(decode.sparse_attention, prefill.sparse_attention)
        return launches(op, *self.arguments(tokens), tokens=tokens, target=target)


def layer(model: str, kind: str, format: RowFormat = RowFormat.KV_FP8) -> Case:
    """A layer of a published model with room for 8200 tokens."""
    heads = HEADS[model]
    if kind == "CSA":
        return Case(heads, CSA, LISTED[model], 2050, format)
    return Case(heads, HCA, None, 65, format) if kind == "HCA" else Case(heads, 0, format=format)
