"""Inputs of ``prepare_attention`` for every kind of layer, on the default device, which may be
torch's meta device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.caches.layer import CompressedState, CompressorRing
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm
from tests.ops import cases
from tests.ops.cases import EPS, HEAD_DIM, ROPE_DIM

INDEX_WIDTH = 128
RING_SLOTS = 144
RATIOS = {"window": 0, "csa": 4, "hca": 128}
# The bytes of a row that nobody has written.
JUNK = 0x5A


@dataclass(frozen=True)
class Step:
    """The arguments of one call."""

    queries: Queries
    kv_TD: Tensor
    positions_T: Tensor
    norm: QueryKeyNorm
    ring: RowCache
    compressions: tuple[Compression, ...]

    def arguments(
        self,
    ) -> tuple[Queries, Tensor, Tensor, QueryKeyNorm, RowCache, tuple[Compression, ...]]:
        return self.queries, self.kv_TD, self.positions_T, self.norm, self.ring, self.compressions

    def caches(self) -> list[Tensor]:
        """Every buffer that the call may change."""
        buffers = [self.ring.data, self.ring.block_scale]
        for compression in self.compressions:
            ring = compression.state.ring
            rows = compression.state.rows
            buffers += [ring.kv, ring.score, rows.data, rows.block_scale]
        return [buffer for buffer in buffers if buffer is not None]

    def twin(self) -> "Step":
        """The same inputs and copies of the caches."""
        compressions = []
        for compression in self.compressions:
            ring = compression.state.ring
            rows = compression.state.rows
            copy = CompressedState(
                CompressorRing(ring.kv.clone(), ring.score.clone()), copy_of(rows)
            )
            compressions.append(replace(compression, state=copy))
        return replace(self, ring=copy_of(self.ring), compressions=tuple(compressions))


def on_meta() -> bool:
    """Whether tensors are to have no values, which takes no time."""
    return torch.get_default_device().type == "meta"


def normal(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """``tests.ops.cases.normal``."""
    if on_meta():
        return torch.empty(shape, dtype=dtype)
    return cases.normal(*shape, seed=seed, dtype=dtype, scale=scale)


def norm_weight(width: int, seed: int) -> Tensor:
    """Values near 1."""
    return torch.empty(width) if on_meta() else 1 + 0.1 * normal(width, seed=seed)


def inv_freq(ratio: int) -> Tensor:
    """``tests.ops.cases.inv_freq``."""
    return torch.empty(ROPE_DIM // 2) if on_meta() else cases.inv_freq(ratio)


def copy_of(rows: RowCache) -> RowCache:
    return replace(
        rows,
        data=rows.data.clone(),
        block_scale=None if rows.block_scale is None else rows.block_scale.clone(),
    )


def step(
    kind: str,
    start: int,
    tokens: int,
    heads: int = 4,
    index_heads: int = 4,
    quantised: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """``tokens`` tokens from ``start`` on, the caches full of junk and of the tokens before."""
    ratio = RATIOS[kind]
    norm = QueryKeyNorm(norm_weight(HEAD_DIM, seed=1), inv_freq(ratio), EPS)
    format = RowFormat.KV_FP8 if quantised else RowFormat.PLAIN
    ring = junk_rows(RING_SLOTS, HEAD_DIM, format, dtype)
    index_TID = None
    compressions = []
    if ratio:
        rows = junk_rows((start + tokens) // ratio + 1, HEAD_DIM, ring.format, dtype)
        compressions.append(compression(ratio, rows, tokens, norm.inv_freq, dtype, seed=10))
    if ratio == 4:
        index_TID = normal(tokens, index_heads, INDEX_WIDTH, seed=2, dtype=dtype)
        format = RowFormat.INDEX_FP8 if quantised else RowFormat.PLAIN
        rows = junk_rows((start + tokens) // ratio + 1, INDEX_WIDTH, format, dtype)
        compressions.append(compression(ratio, rows, tokens, norm.inv_freq, dtype, seed=20))
    return Step(
        Queries(normal(tokens, heads, HEAD_DIM, seed=3, dtype=dtype), index_TID),
        normal(tokens, HEAD_DIM, seed=4, dtype=dtype),
        torch.arange(start, start + tokens),
        norm,
        ring,
        tuple(compressions),
    )


def compression(
    ratio: int, rows: RowCache, tokens: int, frequencies: Tensor, dtype: torch.dtype, seed: int
) -> Compression:
    """The main compressor, or for rows of another width the indexer's."""
    columns = 2 * rows.width if ratio == 4 else rows.width
    ape = normal(ratio, columns, seed=seed)
    norm = norm_weight(rows.width, seed=seed + 1)
    weights = CompressorWeights(ape, norm, frequencies, EPS, ratio, rows.width != HEAD_DIM, dtype)
    ring = CompressorRing.allocate(ratio, columns, rows.data.device)
    ring.kv.copy_(normal(*ring.kv.shape, seed=seed + 2))
    ring.score.copy_(normal(*ring.score.shape, seed=seed + 3))
    products = (
        normal(tokens, columns, seed=seed + 4),
        normal(tokens, columns, seed=seed + 5, scale=2.0),
    )
    return Compression(*products, weights, CompressedState(ring, rows))


def junk_rows(slots: int, width: int, format: RowFormat, dtype: torch.dtype) -> RowCache:
    rows = RowCache.allocate(slots, width, ROPE_DIM, format, dtype, torch.get_default_device())
    for part in (rows.data, rows.block_scale):
        if part is not None:
            part.view(torch.uint8).fill_(JUNK)
    return rows
