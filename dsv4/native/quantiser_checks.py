"""The checks of activation quantisers, bit by bit against the torch ones."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.launch.recording import Recording
from dsv4.native.check import Check
from dsv4.native.difference import different_bits
from dsv4.native.random_weights import RandomWeights
from dsv4.ops import quantize_activations as reference
from dsv4.ops.immediate import immediately
from dsv4.ops.quantize_activations import ActivationFormat, cuda, hidden_global_scale
from dsv4.weights.scale_swizzle import swizzle_block_scale

KERNEL = "quantize_activations"
# Rows whose last atom is not full, and the widths of the published models.
SHAPES = ((130, 320), (300, 4096), (257, 7168), (9, 16384))
# Of hidden rows: limit and routed scaling of the published models.
_HIDDEN = (10.0, 2.5)


def quantiser_checks(format: ActivationFormat) -> Iterator[Check]:
    """Of all finite bfloat16 values and of random rows; in NVFP4 also with a fixed global scale."""
    nvfp4 = format is ActivationFormat.NVFP4
    for global_scale in (None, hidden_global_scale(*_HIDDEN)) if nvfp4 else (None,):
        fixed = "" if global_scale is None else ", fixed global scale"
        for shape in (None, *SHAPES):
            rows = "all values" if shape is None else "x".join(map(str, shape))
            name = f"quantise {format.value} {rows}{fixed}"
            yield Check(name, KERNEL, partial(_wrong, format, global_scale, shape))


def _wrong(
    format: ActivationFormat,
    global_scale: float | None,
    shape: tuple[int, int] | None,
    device: torch.device,
) -> str | None:
    x = _all_values(device) if shape is None else RandomWeights(device).rows(*shape)

    def op(recording: Recording, x: Tensor) -> list[Tensor]:
        rows = cuda.quantize_rows(recording, x, format, global_scale=global_scale)
        return [part for part in (rows.codes, rows.scales, rows.global_scale) if part is not None]

    rows = reference.quantize_rows(x.cpu(), format, global_scale)
    missing = -x.shape[0] % cuda.ATOM_ROWS
    expected = [pad(rows.codes, (0, 0, 0, missing)), swizzle_block_scale(rows.scales)]
    if rows.global_scale is not None:
        expected.append(pad(rows.global_scale, (0, missing)))
    pairs = zip(("codes", "scales", "global scales"), immediately(op)(x), expected, strict=False)
    for name, found, wanted in pairs:
        wrong = different_bits(found.cpu(), wanted)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _all_values(device: torch.device) -> Tensor:
    """bfloat16 ``[512, 128]``: every finite value, zeros in the place of others."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return torch.where(values.isfinite(), values, torch.zeros_like(values)).view(512, 128)
