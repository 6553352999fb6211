"""Recorded products: kernels and their order on published and unusual shapes, chunks shorter than
the recording.
"""

import itertools

import pytest
import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call, Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.launch.workspace import lay_out
from dsv4.ops.linear import decode, prefill
from dsv4.ops.linear.row_list import pack_rows
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import (
    BF16,
    FP8,
    MXFP4,
    NVFP4,
    TARGETS,
    activations,
    empty,
    names,
    shapes,
    stored,
)
from tests.ops.linear.products import LISTS, packed_list, record_everything
from tests.ops.recorded import MOST_SHARED_BYTES

TOKENS = (9, 10, 100, 129, 511, 512)


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
def test_decode_is_one_launch_per_two_formats(target: Target, tokens: int) -> None:
    for columns, matrices in LISTS.values():
        recording = Recording(target, tokens)
        rows = packed_list(matrices, columns)
        x = activations(recording, columns)
        norm_weight = empty(torch.float32, columns)
        products = decode.linear_rows(recording, x, rows, norm_weight, 1e-6)
        formats = len({format for _, format in matrices})
        assert names(recording) == ["decode_linear"] * (1 + (formats > 2))
        assert {
            dict(shape.kernel.defines)["FUSED_NORM"] for shape in shapes(recording, tokens)
        } == {1}
        assert [tuple(product.shape) for product in products] == [(tokens, n) for n, _ in matrices]
    recording = Recording(target, tokens)
    record_everything(decode, recording)
    assert set(names(recording)) == {"decode_linear"}


def test_decode_products_are_views_of_one_buffer() -> None:
    """float32 products lie first; none overlap, for every number of tokens."""
    for tokens in range(1, 9):
        recording = Recording(TARGETS[0], tokens)
        rows = packed_list(LISTS["four formats"][1], 128)
        products = decode.linear_rows(recording, activations(recording, 128), rows)
        assert len({storage_key(product) for product in products}) == 1
        spans = sorted(
            (product.storage_offset() * product.itemsize, product.nbytes) for product in products
        )
        assert all(start % 2 == 0 for start, _ in spans)
        ends = [start + nbytes for start, nbytes in spans]
        assert [start for start, _ in spans] == [0, *ends[:-1]]
        assert ends[-1] <= products[0].untyped_storage().nbytes()
        assert min(products, key=Tensor.storage_offset).dtype == torch.float32


def test_decode_normalises_first_where_a_block_sees_k_in_slices() -> None:
    recording = Recording(TARGETS[0], 8)
    rows = pack_rows([stored(FP8, 1024, 16384)], [None])
    norm_weight = empty(torch.float32, 16384)
    decode.linear_rows(recording, activations(recording, 16384), rows, norm_weight, 1e-6)
    assert names(recording) == ["rms_norm", "decode_linear"]
    assert dict(shapes(recording, 8)[1].kernel.defines)["FUSED_NORM"] == 0


@pytest.mark.parametrize("most", [512, 2048])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
def test_a_shorter_chunk_is_launched_as_if_recorded_for_it(target: Target, most: int) -> None:
    recording = Recording(target, most)
    record_everything(prefill, recording)
    for tokens in TOKENS:
        exact = Recording(target, tokens)
        record_everything(prefill, exact)
        assert names(exact) == names(recording)
        assert shapes(recording, tokens) == shapes(exact, tokens)


def test_prefill_is_a_norm_and_a_launch_per_matrix() -> None:
    recording = Recording(TARGETS[0], 512)
    rows = packed_list(LISTS["Pro CSA input"][1], 7168)
    x = activations(recording, 7168)
    norm_weight = empty(torch.float32, 7168)
    products = prefill.linear_rows(recording, x, rows, norm_weight, 1e-6)
    assert names(recording) == ["rms_norm"] + ["prefill_linear"] * 6
    assert len({storage_key(product) for product in products}) == 6
    assert all(product.is_contiguous() for product in products)


@pytest.mark.parametrize("format", [NVFP4, MXFP4, FP8, BF16], ids=lambda format: format.value)
def test_every_build_fits_into_shared_memory(format: QuantFormat) -> None:
    """A stage is 128 tokens and 256 rows of 64 columns, or fewer and more, as prefill_gemm.cuh lays
    it out.
    """
    modes = (prefill.MODE_LINEAR, prefill.MODE_GATE_UP, prefill.MODE_DOWN)
    tiles = ((prefill.NARROW, 128, 256), (prefill.SOME, 64, 384), (prefill.FEW, 32, 384))
    for target, mode, (tile, tokens, rows) in itertools.product(TARGETS, modes, tiles):
        build = prefill.build_for(format, mode, target.architecture, tile=tile)
        stages = dict(build.defines)["STAGES"]
        assert dict(build.defines)["SHARED_BYTES"] == build.shared_bytes
        weight_bytes = len(pack_weight(stored(format, rows, 64)).data.flatten())
        assert stages * (tokens * 64 * 2 + weight_bytes) < build.shared_bytes
        assert build.shared_bytes <= MOST_SHARED_BYTES
        assert stages >= 4


def test_partial_sums_have_room_for_every_number_of_tokens() -> None:
    """The split over K depends on the tokens: most partial tiles are not those of the longest
    chunk.
    """
    weight = pack_weight(stored(FP8, 1536, 7168))
    recording = Recording(TARGETS[0], 1024)
    prefill.linear(recording, activations(recording, 7168), weight)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    *_, y, parts, counters = launch.tensors
    assert y.shape == (1024, 1536)
    splits = {}
    for tokens in range(9, 1025):
        (shape,) = shapes(recording, tokens)
        splits[tokens] = shape.numbers["splits"]
        tiles = 6 * ceil_div(tokens, 128)
        # Per tile and split: 2 row tiles of 16 tokens' eights, 4 values, 256 threads.
        assert tiles * splits[tokens] * 2 * 16 * 4 * 256 <= parts.numel() or splits[tokens] == 1
        assert tiles <= counters.numel()
        assert shape.numbers["tokens"] == tokens
    assert splits[9] == 16
    assert splits[1024] == 2
    head = pack_weight(stored(BF16, 129280, 7168))
    prefill.linear(recording, activations(recording, 7168), head)
    whole = recording.items[-1]
    assert isinstance(whole, Launch)
    assert whole.arguments["parts"] is None


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
def test_long_steps_are_those_of_few_splits(target: Target) -> None:
    for rows, columns, groups in ((512, 4096, 1), (4096, 8192, 1), (512, 960, 1), (1024, 4096, 8)):
        split = prefill.Split.of(target, prefill.MODE_LINEAR, rows, columns, groups)
        for tokens in range(129, 6000, 64):
            assert (tokens >= split.long_from) == (split.splits(tokens) < 4), (rows, tokens)


def test_rows_that_no_access_fits_are_copied() -> None:
    """K that is no multiple of 8: one copy with padded rows; odd N, whose rows are padded: one
    without gaps; groups that share a tile: each one.
    """
    recording = Recording(TARGETS[0], 40)
    odd = pack_weight(stored(BF16, 65, 33))
    y = prefill.linear(recording, activations(recording, 33), odd)
    assert (y.shape, y.is_contiguous()) == ((40, 65), True)
    assert names(recording) == ["call", "prefill_linear", "call"]
    launch = recording.items[1]
    assert isinstance(launch, Launch)
    assert launch.arguments["x_stride"] == 40
    # bf16 results are written in pairs of rows.
    assert launch.arguments["y_stride"] == 66
    recording = Recording(TARGETS[0], 40)
    weight = pack_weight(stored(BF16, 2 * 20, 96))
    prefill.grouped_linear(recording, activations(recording, 2, 96), weight)
    assert names(recording) == ["prefill_linear", "call"] * 2


def test_recorded_copies_give_the_products_their_rows() -> None:
    """The copies run on any device: those of a shorter chunk leave the rows behind it alone."""
    source = torch.randn(10, 6).bfloat16()
    target = torch.zeros(10, 8).bfloat16()
    recording = Recording(TARGETS[0], 10)
    prefill.aligned_rows(recording, activations(recording, 6))
    (item,) = recording.items
    assert isinstance(item, Call)
    item.function(4, target[:, :6], source)
    assert torch.equal(target[:4, :6], source[:4])
    assert not target[4:].any()
    assert not target[:, 6:].any()


def test_buffers_share_memory() -> None:
    """Partial sums of one product lie where those of the last did."""
    recording = Recording(TARGETS[0], 512)
    weight = pack_weight(stored(FP8, 4096, 4096))
    x = activations(recording, 4096)
    for _ in range(8):
        x = prefill.linear(recording, x, weight)
    *_, partial, _ = recording.items[0].tensors
    assert lay_out(recording).nbytes < 2 * partial.nbytes


def test_wrong_operands_are_value_errors_that_name_the_argument() -> None:
    weight = pack_weight(stored(FP8, 64, 128))
    rows = pack_rows([stored(FP8, 64, 128)], [None])
    for entry, tokens in ((decode, 2), (prefill, 16)):
        recording = Recording(TARGETS[0], tokens)
        x = activations(recording, 128)
        with pytest.raises(ValueError, match=r"^x: found torch\.float32, expected torch\.bfloat16"):
            entry.linear(recording, empty(torch.float32, tokens, 128), weight)
        with pytest.raises(ValueError, match=r"^x: found width 64, expected K = 128"):
            entry.linear(recording, x[:, :64], weight)
        with pytest.raises(ValueError, match=r"^x: found strides .*, expected rows without gaps"):
            entry.linear(recording, activations(recording, 256)[:, ::2], weight)
        with pytest.raises(ValueError, match=r"^out_dtype: found torch\.float16"):
            entry.linear(recording, x, weight, torch.float16)
        with pytest.raises(ValueError, match=r"^weight: found shape \(2, 64, 128\)"):
            entry.linear(recording, x, pack_weight(stored(FP8, 2, 64, 128)))
        with pytest.raises(ValueError, match=r"^x: found \(\d+, 3, 128\), expected \[T, G, 128\]"):
            entry.grouped_linear(recording, activations(recording, 3, 128), weight)
        with pytest.raises(ValueError, match=r"^norm_weight: found .*\(64,\), expected .*\(128,\)"):
            entry.linear_rows(recording, x, rows, empty(torch.float32, 64), 1e-6)
        with pytest.raises(ValueError, match=r"^x: found \(\d+, 64\), expected \[T, 128\]"):
            entry.linear_rows(recording, x[:, :64], rows)
        assert recording.items == []
    with pytest.raises(ValueError, match=r"^x: found 9 tokens, expected 1 to 8"):
        decode.linear(Recording(TARGETS[0], 9), empty(torch.bfloat16, 9, 128), weight)
    with pytest.raises(ValueError, match=r"^x: found 9 tokens, expected 16 of the recording"):
        prefill.linear(Recording(TARGETS[0], 16), empty(torch.bfloat16, 9, 128), weight)
