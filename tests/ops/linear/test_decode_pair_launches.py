"""Which products of a decode step become one launch, and what it asks for."""

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode
from dsv4.ops.linear.decode_plan import LEAST_SHARED
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.tables import CUDA_TABLE, RecordedTable, swap_ops
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import FP8, NVFP4, TARGETS, activations, names, stored
from tests.ops.linear.pairs import in_two_launches, output_projection
from tests.ops.recorded import MOST_SHARED_BYTES

# Groups, columns and rows of a group, outputs.
FLASH = (8, 4096, 1024, 4096)
PRO = (16, 4096, 1024, 7168)


def recorded(
    tokens: int,
    sizes: tuple[int, int, int, int] = FLASH,
    target: Target = TARGETS[0],
    format: QuantFormat = FP8,
) -> Recording:
    groups, columns, rows, outputs = sizes
    recording = Recording(target, tokens)
    o_TGK = activations(recording, groups * columns).unflatten(1, (groups, columns))
    wo_a, wo_b = stored(format, groups * rows, columns), stored(format, outputs, groups * rows)
    output_projection(recording, o_TGK, pack_weight(wo_a), pack_weight(wo_b))
    return recording


def pair(recording: Recording) -> Launch:
    (item,) = recording.items
    assert isinstance(item, Launch)
    assert item.shape.kernel.function == "decode_pair"
    return item


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=["flash", "pro"])
def test_products_of_one_and_two_tokens_are_one_launch(
    sizes: tuple[int, int, int, int], target: Target
) -> None:
    for tokens, depth in ((1, 5), (2, 5 if sizes == FLASH else 4)):
        launch = pair(recorded(tokens, sizes, target))
        assert launch.shape.grid[0] <= target.multiprocessors, "all are resident at once"
        assert LEAST_SHARED <= launch.shape.shared_bytes <= MOST_SHARED_BYTES
        assert dict(launch.shape.kernel.defines)["DEPTH"] == depth
        assert launch.arguments["half_bytes"] == 2 * tokens * sizes[0] * sizes[2]
    for tokens in (3, 8):
        assert names(recorded(tokens, sizes, target)) == ["decode_linear"] * 2


def test_fewer_stages_where_there_is_less_room() -> None:
    """The second sizes leave room for as many as a launch of one product has, the last for less."""
    depths = {
        columns: dict(pair(recorded(1, (8, 128, columns // 8, 64))).shape.kernel.defines)["DEPTH"]
        for columns in (16384, 32768)
    }
    assert depths == {16384: 5, 32768: 4}
    assert names(recorded(1, (8, 128, 6144, 64))) == ["decode_linear"] * 2


def test_rows_of_a_group_are_whole_tiles() -> None:
    assert names(recorded(1, (2, 128, 40, 64))) == ["decode_linear"] * 2
    pair(recorded(1, (2, 128, 48, 64)))


def test_the_results_of_two_launches_are_both_written() -> None:
    shapes = [tuple(tensor.shape) for tensor in pair(recorded(2)).tensors]
    assert (2, 8, 1024) in shapes
    assert (2, 4096) in shapes


def test_other_products_stay_apart() -> None:
    o_T2K = torch.empty(1, 2, 128, dtype=torch.bfloat16, device="meta")
    wo_a, wo_b = (pack_weight(stored(FP8, 64, columns)) for columns in (128, 64))
    recording = Recording(TARGETS[0], 1)
    in_two_launches(recording, o_T2K, wo_a, wo_b)
    assert names(recording) == ["decode_linear", "call", "decode_linear"]
    # Of another input, of a part of the result, with a norm.
    recording = Recording(TARGETS[0], 1)
    decode.grouped_linear(recording, o_T2K, wo_a)
    decode.linear(recording, activations(recording, 64), wo_b)
    narrow = pack_weight(stored(FP8, 64, 32))
    low_T2R = decode.grouped_linear(recording, o_T2K, wo_a)
    decode.linear(recording, low_T2R[:, 0], narrow)
    rows = pack_rows([stored(FP8, 64, 64)], [None])
    low_T2R = decode.grouped_linear(recording, o_T2K, wo_a)
    norm_weight = torch.empty(64, device="meta")
    decode.linear_rows(recording, low_T2R.flatten(1), rows, norm_weight, 1e-6)
    assert names(recording) == ["decode_linear"] * 6


def test_blocks_behind_a_small_launch_ask_for_x_first() -> None:
    """Those whose multiprocessors it has until it ends."""
    groups, columns, rows, outputs = FLASH
    wo_a = pack_weight(stored(FP8, groups * rows, columns))
    wo_b = pack_weight(stored(FP8, outputs, groups * rows))
    for in_front, late in ((16 * 33, 99), (16 * 34, 132)):
        recording = Recording(TARGETS[0], 1)
        x = activations(recording, 128)
        decode.linear(recording, x, pack_weight(stored(FP8, in_front, 128)))
        o_TGK = activations(recording, groups * columns).unflatten(1, (groups, columns))
        output_projection(recording, o_TGK, wo_a, wo_b)
        (_, launch) = recording.items
        assert isinstance(launch, Launch)
        assert launch.arguments["late_from"] == late
    assert pair(recorded(1)).arguments["late_from"] == 132


@pytest.mark.parametrize("swapped", ["grouped_linear", "linear"])
def test_a_swapped_op_leaves_the_other_one_as_it_is(swapped: str) -> None:
    table = swap_ops(CUDA_TABLE, {swapped: "torch"})
    assert isinstance(table, RecordedTable)
    recording = Recording(TARGETS[0], 1)
    ops = table.on(recording)
    o_T2K = torch.empty(1, 2, 128, dtype=torch.bfloat16, device="meta")
    wo_a, wo_b = (pack_weight(stored(NVFP4, 64, columns)) for columns in (128, 64))
    ops.linear(ops.grouped_linear(o_T2K, wo_a).flatten(1), wo_b)
    assert sorted(names(recording)) == ["call", "decode_linear"]
