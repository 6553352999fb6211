"""What the quantisers record: a block for every row up to a multiple of 128, buffers that hold
them, and what they refuse.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.ops.moe.sorted_pairs import sort_by_expert
from dsv4.ops.quantize_activations import ActivationFormat, quantize_rows
from dsv4.ops.quantize_activations import cuda as launchers
from dsv4.ops.quantize_activations.cuda import SwizzledRows
from tests.ops.quantize_activations.values import swizzled
from tests.ops.recorded import (
    BLACKWELL,
    HOPPER,
    SHORTER,
    assert_serves_shorter_chunks,
    launches,
    meta,
    shape_at,
)

FORMATS = list(ActivationFormat)
FP8 = ActivationFormat.FP8
NVFP4 = ActivationFormat.NVFP4


def recorded(
    tokens: int, columns: int, format: ActivationFormat, norm: bool = False
) -> tuple[Launch, SwizzledRows]:
    recording = Recording(BLACKWELL, tokens)
    x = recording.empty((tokens, columns), torch.bfloat16)
    weight = meta(columns, dtype=torch.float32) if norm else None
    rows = launchers.quantize_rows(recording, x, format, weight, 1e-6)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    return launch, rows


@pytest.mark.parametrize("columns", [8, 72, 128, 1536, 4096, 7168, 65_536])
@pytest.mark.parametrize("format", FORMATS)
def test_buffers_hold_what_the_definition_says(format: ActivationFormat, columns: int) -> None:
    launch, rows = recorded(200, columns, format)
    wanted = swizzled(quantize_rows(torch.zeros(200, columns), format))
    for found, expected in zip((rows.codes, rows.scales, rows.global_scale), wanted, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
    assert launch.shape.blocks == 256
    defines = dict(launch.shape.kernel.defines)
    padded = format.padded_columns(columns)
    assert defines["GROUPS"] * launch.shape.threads * 8 >= padded
    assert (defines["GROUPS"] - 1) * launch.shape.threads * 8 < padded
    assert defines["ALIGNED"] == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_recording_serves_shorter_chunks(format: ActivationFormat) -> None:
    def record(tokens: int) -> list[Launch]:
        return [recorded(tokens, 1536, format, norm=True)[0]]

    assert_serves_shorter_chunks(record, 512)
    launch, _ = recorded(512, 1536, format)
    for tokens in SHORTER:
        shape = shape_at(launch, tokens)
        assert getattr(shape, "numbers", None) == {"tokens": tokens}


@pytest.mark.parametrize("format", FORMATS)
def test_sorted_rows_have_whole_tiles(format: ActivationFormat) -> None:
    def record(tokens: int) -> list[Launch]:
        def op(recording: Recording, x: Tensor, ids: Tensor) -> None:
            pairs = sort_by_expert(recording, ids, 256)
            rows = launchers.quantize_sorted_rows(recording, x, pairs, format)
            assert rows.codes.shape[0] == 128 * pairs.tiles.shape[0]

        x = meta(tokens, 4096)
        return launches(op, x, meta(tokens, 6, dtype=torch.int64), tokens=tokens)[1:]

    (launch,) = record(512)
    # 24 full tiles, and one begun for each expert.
    assert launch.shape.blocks == 128 * (512 * 6 // 128 + 256)
    assert_serves_shorter_chunks(record, 512)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_without_vectors_are_read_one_by_one(format: ActivationFormat) -> None:
    for columns, first in ((512, 1), (301, 0), (513, 0)):
        recording = Recording(HOPPER, 9)
        x = recording.empty((9, 600), torch.bfloat16)[:, first : first + columns]
        launchers.quantize_rows(recording, x, format)
        (launch,) = recording.items
        assert isinstance(launch, Launch)
        is_aligned = first == 0 and columns % 8 == 0
        assert dict(launch.shape.kernel.defines)["ALIGNED"] == int(is_aligned)


def test_refuses_what_it_cannot_quantise() -> None:
    recording = Recording(HOPPER, 9)
    x = recording.empty((9, 64), torch.bfloat16)
    quantize = launchers.quantize_rows
    with pytest.raises(ValueError, match=r"^x: found torch\.float32 \[9, 64\], expected"):
        quantize(recording, recording.empty((9, 64), torch.float32), FP8)
    with pytest.raises(ValueError, match=r"^x: found strides \(64, 2\)"):
        quantize(recording, x[:, ::2], FP8)
    with pytest.raises(ValueError, match=r"^x: found 8 tokens, expected 9 of the recording"):
        quantize(recording, x[:8], FP8)
    with pytest.raises(ValueError, match=r"^norm_weight: found torch\.float32 \[32\]"):
        quantize(recording, x, FP8, meta(32, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"^global_scale: found 0\.5 for fp8, expected None"):
        quantize(recording, x, FP8, global_scale=0.5)
    with pytest.raises(ValueError, match=r"^global_scale: found -1\.0 for nvfp4"):
        quantize(recording, x, NVFP4, global_scale=-1.0)
    assert recording.items == []
