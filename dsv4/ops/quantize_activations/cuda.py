"""Quantised rows on the GPU, as block-scaled tensor cores read them: one block per row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.moe.sorted_pairs import Sorted
from dsv4.ops.quantize_activations import ActivationFormat

# Rows of a scale atom; those of a result are a multiple of it.
ATOM_ROWS = 128
# Columns of one 16-byte access.
_VECTOR = 8
_MAX_THREADS = 1024
_SOURCE = "quantize_activations/quantize_activations"


@dataclass(frozen=True)
class SwizzledRows:
    """``QuantizedRows`` with scales in the order of the tensor cores. R rows, a multiple of 128,
    zeros in those that stand for nothing.

    ``codes`` uint8 ``[R, K']`` or ``[R, K'/2]``; ``scales`` uint8 ``[R/128 · S/4 · 512]`` for S
    scales a row (model.md#scale-swizzle); ``global_scale`` float32 ``[R]`` in NVFP4. ``columns``
    is K.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: ActivationFormat
    columns: int

    @classmethod
    def empty(
        cls, recording: Recording, rows: int, columns: int, format: ActivationFormat
    ) -> "SwizzledRows":
        """Buffers of a recording for at least ``rows`` rows."""
        rows = round_up(rows, ATOM_ROWS)
        padded = format.padded_columns(columns)
        codes = recording.empty((rows, padded // format.codes_per_byte), torch.uint8)
        scales = recording.empty((rows * padded // format.group_size,), torch.uint8)
        total = None
        if format is ActivationFormat.NVFP4:
            total = recording.empty((rows,), torch.float32)
        return cls(codes, scales, total, format, columns)


def quantize_rows(
    recording: Recording,
    x: Tensor,
    format: ActivationFormat,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    global_scale: float | None = None,
) -> SwizzledRows:
    """``dsv4.ops.quantize_activations.quantize_rows`` of bfloat16 x ``[T, K]``, T the recording's
    number of tokens. Row t of the result is row t of x.

    With ``norm_weight`` float32 ``[K]``, of ``rms_norm(x, norm_weight, norm_eps)``, rounded to
    bfloat16. ``global_scale``: of every row, in NVFP4 (``hidden_global_scale``). Raises
    ``ValueError`` for other operands.
    """
    _check_rows(x)
    tokens, width = x.shape
    if tokens != recording.tokens:
        raise ValueError(f"x: found {tokens} tokens, expected {recording.tokens} of the recording")
    if norm_weight is not None:
        expect("norm_weight", norm_weight, torch.float32, (width,))
    if global_scale is not None and (format is ActivationFormat.FP8 or not global_scale > 0):
        raise ValueError(f"global_scale: found {global_scale} for {format.value}, expected None")
    rows = SwizzledRows.empty(recording, tokens, width, format)
    build = _Build.of(x, format, norm_weight is not None)

    def shape(tokens: int) -> Shape:
        blocks = round_up(tokens, ATOM_ROWS)
        return build.shape("quantize_rows", blocks, tokens=tokens)

    recording.launch(
        shape,
        x=x,
        norm_weight=norm_weight,
        codes=rows.codes,
        scales=rows.scales.view(torch.int32),
        global_scale=rows.global_scale,
        width=width,
        x_stride=x.stride(0),
        eps=norm_eps,
        fixed_scale=global_scale or 0.0,
    )
    return rows


def quantize_sorted_rows(
    recording: Recording, x: Tensor, pairs: Sorted, format: ActivationFormat
) -> SwizzledRows:
    """The rows of bfloat16 x ``[T, K]`` that the experts read: those of tile i of ``pairs`` from
    row 128 · i on, in its order.

    Rows behind the last tile are not written. Raises ``ValueError`` for other operands.
    """
    _check_rows(x)
    width = x.shape[1]
    most = pairs.tiling(x.shape[0]).most
    rows = SwizzledRows.empty(recording, most * ATOM_ROWS, width, format)
    build = _Build.of(x, format, norm=False)

    def shape(tokens: int) -> Shape:
        return build.shape("quantize_sorted_rows", pairs.tiling(tokens).most * ATOM_ROWS)

    recording.launch(
        shape,
        x=x,
        **pairs.arguments,
        codes=rows.codes,
        scales=rows.scales.view(torch.int32),
        global_scale=rows.global_scale,
        width=width,
        x_stride=x.stride(0),
        per_token=pairs.per_token,
    )
    return rows


@dataclass(frozen=True)
class _Build:
    """The variant of the kernels for rows of one width."""

    defines: tuple[tuple[str, int], ...]
    threads: int

    @classmethod
    def of(cls, x: Tensor, format: ActivationFormat, norm: bool) -> "_Build":
        accesses = format.padded_columns(x.shape[1]) // _VECTOR
        threads = min(round_up(accesses, 32), _MAX_THREADS)
        aligned = x.shape[1] % _VECTOR == 0 and x.stride(0) % _VECTOR == 0 and is_aligned(x, 16)
        return cls(
            (
                ("NVFP4", int(format is ActivationFormat.NVFP4)),
                ("NORM", int(norm)),
                ("GROUPS", ceil_div(accesses, threads)),
                ("ALIGNED", int(aligned)),
            ),
            threads,
        )

    def shape(self, function: str, blocks: int, **numbers: int) -> Shape:
        kernel = Kernel(_SOURCE, function, self.defines)
        return Shape(kernel, blocks, self.threads, numbers=numbers)


def _check_rows(x: Tensor) -> None:
    """Raises ``ValueError`` unless x is bfloat16 ``[T, K]`` without gaps in its rows."""
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise ValueError(f"x: found {x.dtype} {list(x.shape)}, expected torch.bfloat16 [T, K]")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"x: found strides {x.stride()}, expected rows without gaps")
