"""Compressors of layers without memory, for recordings that nothing runs."""

from typing import Any

import torch

from dsv4.caches.layer import CompressedState, CompressorRing
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.launch.items import Launch
from dsv4.ops.compressor import CompressorWeights
from tests.ops import forms
from tests.ops.recorded import launches, meta

META = torch.device("meta")
# ratio, width of a row, format, then what is expected: blocks of a window, groups of its tokens.
SHAPES = {
    "csa": (4, 512, RowFormat.KV_FP8, 1, 1),
    "index": (4, 128, RowFormat.INDEX_FP8, 1, 4),
    "hca": (128, 512, RowFormat.KV_FP8, 8, 8),
    "hca_plain": (128, 512, RowFormat.PLAIN, 8, 8),
    "tiny_csa": (4, 64, RowFormat.KV_FP8, 1, 4),
    "narrow_hca": (128, 96, RowFormat.KV_FP8, 1, 8),
    "wide_hca": (128, 1024, RowFormat.KV_FP8, 1, 8),
}


def float32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def arguments(name: str, tokens: int, spare: int = 0) -> dict[str, Any]:
    ratio, width, format, _, _ = SHAPES[name]
    columns = 2 * width if ratio == 4 else width
    rows = RowCache.allocate(40, width, 64, format, torch.bfloat16, META)
    weights = CompressorWeights(
        ape=float32(ratio, columns),
        norm=float32(width),
        inv_freq=float32(32),
        norm_eps=1e-6,
        ratio=ratio,
        rotate_keys=name == "index",
        compute_dtype=torch.bfloat16,
    )
    return {
        "kv_TW": float32(tokens, columns + spare)[:, :columns],
        "score_TW": float32(tokens, columns + spare)[:, spare:],
        "positions_T": meta(tokens, dtype=torch.int64),
        "weights": weights,
        "state": CompressedState(CompressorRing.allocate(ratio, columns, META), rows),
    }


def record(given: dict[str, Any]) -> list[Launch]:
    tokens = given["kv_TW"].shape[0]
    return launches(forms.compress, *given.values(), tokens=tokens)
