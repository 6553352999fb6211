"""Weight-only products of many tokens (more than a decode step): one GEMM that decodes weights in registers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.launch.loader import Defines, architecture_of, launch, multiprocessors, zeroed_counters
from dsv4.ops.linear.prefill_cutedsl import cutedsl_linear_batches, cutedsl_supports
from dsv4.quant import QuantFormat
from dsv4.weights.packed import PADDING, PackedWeight, padded

# Constants of dsv4/ops/linear/prefill_gemm.cuh.
TILE_TOKENS, THREADS = 128, 384
MODE_LINEAR, MODE_GATE_UP, MODE_DOWN = range(3)
_LINEAR_ROWS, _PARTIAL_FLOATS = 256, 2 * TILE_TOKENS // 8 * 4 * 256
_TOKEN_BYTES, _OTHER_SHARED, _SHARED_LIMIT, _MAX_STAGES = TILE_TOKENS * 128, 2048, 227 << 10, 8
_MIN_SPLIT_STEPS, _MAX_SPLITS, _COUNTERS = 4, 16, 1024
# Tokens from which the CuTe DSL form is faster (docs/kernels.md); for fewer the split over K of the other one wins.
_CUTEDSL_TOKENS = 128


@dataclass(frozen=True)
class _Format:
    code: int
    weight_bytes: int  # of 16 rows and 64 columns
    scale_bytes: int


_FORMATS = {
    QuantFormat.NVFP4: _Format(0, 512, 64),
    QuantFormat.MXFP4: _Format(1, 512, 32),
    QuantFormat.FP8_BLOCK128: _Format(2, 1024, 0),
    QuantFormat.BF16: _Format(3, 2048, 0),
}


@dataclass(frozen=True)
class Build:
    """One compiled variant of the GEMM and what its launch needs."""

    source: str
    defines: Defines
    shared_bytes: int


def build_for(
    format: QuantFormat, mode: int, device: torch.device, out_float: bool = False, wide: bool = False
) -> Build:
    """The variant for a weight format and a mode on ``device``: wgmma on Hopper, mma.sync elsewhere.

    ``wide``: for tiles that hold about 100 tokens on average.
    """
    hopper = architecture_of(device.index or 0) == "sm_90a"
    return build("prefill_gemm_sm90" if hopper else "prefill_gemm", format, mode, out_float, wide)


def build(source: str, format: QuantFormat, mode: int, out_float: bool = False, wide: bool = False) -> Build:
    """The variant of ``source``; as many pipeline stages as shared memory holds."""
    layout = _FORMATS[format]
    used = _TOKEN_BYTES + 16 * (layout.weight_bytes + layout.scale_bytes)
    stage_bytes = -(-used // 1024) * 1024
    stages = min(_MAX_STAGES, (_SHARED_LIMIT - _OTHER_SHARED) // stage_bytes)
    defines = (("FORMAT", layout.code), ("MODE", mode), ("STAGES", stages))
    defines += (("OUT_FLOAT", int(out_float)), ("WIDE", int(wide)))
    return Build(source, defines, stages * stage_bytes + _OTHER_SHARED)


def prefill_linear(x_TK: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x · Wᵀ for x bfloat16 ``[T, K]`` and packed W ``[N, K]``: ``[T, N]`` in bfloat16 (default) or float32.

    Exact products of the stored weights (NVFP4: before its global scale) with x, float32 sums, one rounding
    (``tests/ops/linear/test_prefill_linear.py``). Raises ``ValueError`` naming the argument for anything else.
    """
    out_dtype = out_dtype or x_TK.dtype
    _check(x_TK, weight, 2, out_dtype)
    if x_TK.shape[1] != weight.shape[1]:
        raise ValueError(f"x: found width {x_TK.shape[1]}, expected K = {weight.shape[1]} of the weight {weight.shape}")
    return linear_batches(x_TK.unsqueeze(1), weight, out_dtype)[:, 0]


def prefill_grouped_linear(x_TGK: Tensor, weight: PackedWeight) -> Tensor:
    """Group g of x bfloat16 ``[T, G, K]`` times rows g·R … g·R + R − 1 of W ``[G·R, K]``: bfloat16 ``[T, G, R]``.

    Raises ``ValueError`` as ``dsv4.ops.linear.grouped_linear`` does.
    """
    _check(x_TGK, weight, 3, torch.bfloat16)
    groups = x_TGK.shape[1]
    if weight.shape[0] % groups or x_TGK.shape[2] != weight.shape[1]:
        raise ValueError(
            f"x: found {tuple(x_TGK.shape)}, expected [T, G, {weight.shape[1]}], G a divisor of {weight.shape[0]}"
        )
    rows = weight.shape[0] // groups
    if rows % 16 == 0 or groups == 1:
        return linear_batches(x_TGK, weight, torch.bfloat16)
    # Row tiles would straddle groups: every group by all rows, of which its own are kept. Tiny models only.
    products = [prefill_linear(x_TGK[:, g], weight)[:, g * rows : (g + 1) * rows] for g in range(groups)]
    return torch.stack(products, dim=1)


def linear_batches(x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    """The launch behind both: ``[T, G, R]`` with R a multiple of 16 unless G is 1. Arguments are already checked.

    The only place that chooses an implementation of a dense prefill product.
    """
    wanted = weight.cutedsl and x_TGK.shape[0] >= _CUTEDSL_TOKENS
    if wanted and architecture_of(x_TGK.device.index or 0) == "sm_90a":
        x_TGK = aligned_rows(x_TGK)
        if cutedsl_supports(x_TGK, weight):
            return cutedsl_linear_batches(x_TGK, weight, out_dtype)
    return _split_linear_batches(x_TGK, weight, out_dtype)


def _split_linear_batches(x_TGK: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    tokens, groups, columns = x_TGK.shape
    rows, device = weight.shape[0] // groups, x_TGK.device
    # bf16 results are written in pairs of rows.
    width = groups * rows + (groups * rows) % 2
    y = torch.empty((tokens, width), dtype=out_dtype, device=device)
    if tokens:
        x_TGK = aligned_rows(x_TGK)
        tiles = -(-rows // _LINEAR_ROWS) * -(-tokens // TILE_TOKENS) * groups
        processors = multiprocessors(device)
        splits = max(1, min(processors // tiles, -(-columns // PADDING) // _MIN_SPLIT_STEPS, _MAX_SPLITS))
        partial = counters = None
        if splits > 1:
            partial = torch.empty(tiles * splits * _PARTIAL_FLOATS, dtype=torch.float32, device=device)
            counters = zeroed_counters(device, "prefill_linear", _COUNTERS)
        variant = build_for(weight.format, MODE_LINEAR, device, out_dtype == torch.float32)
        launch(
            *(variant.source, "prefill_linear", min(tiles * splits, processors), THREADS, x_TGK),
            *matrix_arguments(weight),
            *(y, partial, counters, tokens, rows, columns, padded(weight.shape[0]) // 16),
            *(x_TGK.stride(0), x_TGK.stride(1), width, groups, splits),
            device=device,
            shared_bytes=variant.shared_bytes,
            defines=variant.defines,
        )
    return y[:, : groups * rows].unflatten(1, (groups, rows)) if width == groups * rows else y[:, None, :rows]


def matrix_arguments(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """Data, block scales and global scales, as the kernels take them."""
    return weight.data, weight.block_scale, weight.global_scale


def aligned_rows(x: Tensor) -> Tensor:
    """x ``[..., K]`` such that every row starts at a multiple of 16 bytes: itself, or a copy."""
    steps = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in steps):
        return x
    copy = torch.zeros((*x.shape[:-1], -(-x.shape[-1] // 8) * 8), dtype=x.dtype, device=x.device)
    copy[..., : x.shape[-1]] = x
    return copy[..., : x.shape[-1]]


def _check(x: Tensor, weight: PackedWeight, dimensions: int, out_dtype: torch.dtype) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x.dtype}, expected torch.bfloat16")
    if x.dim() != dimensions:
        raise ValueError(f"x: found {x.dim()} dimensions, expected {dimensions}")
    if len(weight.shape) != 2:
        raise ValueError(f"weight: found shape {weight.shape}, expected one matrix [N, K]")
    if x.device != weight.device:
        raise ValueError(f"x: found on {x.device}, expected on {weight.device}, where the weight is")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype: found {out_dtype}, expected torch.bfloat16 or torch.float32")
