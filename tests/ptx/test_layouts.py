"""The machine's registers, tensor memory and shared memory lie as CuTe's layouts say, evaluated on
the host.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from tests.ptx.cute_layouts import evaluate, indices, offset
from tests.ptx.descriptors import SharedMatrix
from tests.ptx.load_store import matrix_rows, matrix_words
from tests.ptx.memory import SharedMemory
from tests.ptx.mma import rows_of_a
from tests.ptx.tensor_map import swizzled
from tests.ptx.tensor_memory import ROWS, TensorMemory, cells
from tests.ptx.umma_operands import first_operand, scales_of
from tests.ptx.wgmma import sums_of_registers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl"),
]

LANES = 32
# Bytes of a lane of tensor memory in CuTe's addresses: 2^16 columns of 32 bits.
LANE_BYTES = 4 << 16


def block_with(content: np.ndarray) -> Any:
    """A block whose tensor memory is allocated and holds ``[128, columns]`` of any dtype."""
    memory = TensorMemory()
    memory.ranges.append((0, 512))
    words = np.ascontiguousarray(content).view(np.uint32)
    memory.content[:, : words.shape[1]] = words
    return SimpleNamespace(rank=0, tensor_memory=memory)


@pytest.mark.parametrize(
    ("way", "shape", "repetitions", "registers"),
    [
        ("St", "16x128b", 8, 16),
        ("Ld", "16x256b", 4, 16),
        ("Ld", "32x32b", 16, 16),
        ("Ld", "32x32b", 32, 32),
    ],
)
def test_registers_of_tensor_memory(way: str, shape: str, repetitions: int, registers: int) -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import tcgen05

    lanes = int(shape.partition("x")[0])
    columns = registers * LANES // lanes

    def build() -> tuple[np.ndarray, np.ndarray]:
        operation = {
            "St16x128b": tcgen05.St16x128bOp,
            "Ld16x256b": tcgen05.Ld16x256bOp,
            "Ld32x32b": tcgen05.Ld32x32bOp,
        }[way + shape]
        atom = cute.make_copy_atom(operation(tcgen05.Repetition(repetitions)), cutlass.Int32)
        pointer = cute.make_ptr(cutlass.Int32, 0, cute.AddressSpace.tmem, assumed_align=16)
        memory = cute.make_tensor(pointer, cute.make_layout((ROWS, columns), stride=(1 << 16, 1)))
        copy = tcgen05.make_tmem_copy(atom, memory)
        sides = [copy.layout_src_tv_tiled, copy.layout_dst_tv_tiled]
        of_registers, of_memory = sides if way == "St" else sides[::-1]
        return (
            indices(of_registers, 4 * LANES, registers),
            indices(of_memory, 4 * LANES, lanes * columns)[::LANES],
        )

    of_registers, of_memory = evaluate(build, "sm_100a")
    # Of each warp: the cells of its lanes, columns first.
    places = {
        int(index): (warp, value // columns, value % columns)
        for warp in range(4)
        for value, index in enumerate(of_memory[warp])
    }
    lane, column = cells(shape, registers)
    for warp in range(4):
        for thread in range(LANES):
            found = [places[int(index)] for index in of_registers[LANES * warp + thread]]
            wanted = zip(lane[:, thread], column[:, thread], strict=True)
            assert found == [(warp, int(row), int(c)) for row, c in wanted]


def wgmma_layouts() -> tuple[np.ndarray, np.ndarray]:
    """(operand ``[128, 8]``, sums ``[128, 16]``) of m64n32k16: row + 64 · column."""
    from cutlass import BFloat16, Float32, cute
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

    def build() -> tuple[np.ndarray, np.ndarray]:
        operation = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (64, 32, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        mma = cute.make_tiled_mma(operation)
        operand = indices(mma.tv_layout_A_tiled, 128, 8)
        return operand, indices(mma.tv_layout_C_tiled, 128, 16)

    return evaluate(build, "sm_90a")


def test_registers_of_wgmma() -> None:
    operand, sums = wgmma_layouts()
    matrix = np.arange(64 * 16, dtype=np.uint16).reshape(64, 16)
    accumulator = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    for warp in range(4):
        threads = slice(LANES * warp, LANES * warp + LANES)
        rows = slice(16 * warp, 16 * warp + 16)
        index = operand[threads]
        words = np.ascontiguousarray(matrix[index % 64, index // 64]).view(np.uint32)
        assert np.array_equal(rows_of_a(words.T), matrix[rows])
        index = sums[threads]
        held = accumulator[index % 64, index // 64]
        assert np.array_equal(sums_of_registers(held.T), accumulator[rows])


@pytest.mark.parametrize("transposed", [False, True])
def test_registers_of_stmatrix(transposed: bool) -> None:
    from cutlass import BFloat16, cute
    from cutlass.cute.nvgpu import warp

    def build() -> tuple[np.ndarray, np.ndarray]:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), BFloat16)
        return indices(atom.layout_src_tv, LANES, 8), indices(atom.layout_dst_tv, LANES, 8)

    registers, memory = evaluate(build, "sm_90a")
    # Thread t names the address of row t % 8 of matrix t / 8.
    wanted = memory.reshape(4, 8, 8)
    for matrix in range(4):
        words = registers[:, 2 * matrix : 2 * matrix + 2].astype(np.uint16)
        held = np.ascontiguousarray(words).view(np.uint32)[:, 0]
        assert np.array_equal(matrix_rows(held, transposed), wanted[matrix])


@pytest.mark.parametrize("transposed", [False, True])
def test_registers_of_ldmatrix(transposed: bool) -> None:
    from cutlass import BFloat16, cute
    from cutlass.cute.nvgpu import warp

    def build() -> tuple[np.ndarray, np.ndarray]:
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), BFloat16)
        return indices(atom.layout_src_tv, LANES, 8), indices(atom.layout_dst_tv, LANES, 8)

    memory, registers = evaluate(build, "sm_90a")
    # Thread t names the address of row t % 8 of matrix t / 8.
    rows = memory.reshape(4, 8, 8).astype(np.uint16)
    for matrix in range(4):
        words = registers[:, 2 * matrix : 2 * matrix + 2].astype(np.uint16)
        wanted = np.ascontiguousarray(words).view(np.uint32)[:, 0]
        assert np.array_equal(matrix_words(rows[matrix], transposed), wanted)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_swizzled_rows_of_shared_memory(bits: int) -> None:
    from cutlass import cute

    width = 16 << bits

    def build() -> np.ndarray:
        plain = cute.make_layout((16, width), stride=(width, 1))
        layout = cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)
        units = [[cute.crd2idx((r, 16 * u), layout) for u in range(width // 16)] for r in range(16)]
        return np.array(units)

    wanted = (evaluate(build, "sm_100a")[..., None] + np.arange(16)).reshape(16, width)
    start = 2048
    assert np.array_equal(
        swizzled(start + np.arange(16 * width), bits).reshape(16, -1) - start, wanted
    )
    memory = SharedMemory(8192)
    matrix = SharedMatrix(start, 8 * width, width, bits)
    for shift in (0, 8):
        memory.content[:] = np.arange(8192) >> shift
        found = matrix.rows(memory, 16, width, "test")
        assert np.array_equal(found, (start + wanted >> shift & 255).astype(np.uint8))


def block_scaled_layouts(four_bit: bool, columns: int) -> list[np.ndarray]:
    """Bytes ``[rows, steps, scales]`` of the scales of a and b: in shared memory, then in the first
    quarter of the lanes of tensor memory, then in its last quarter.
    """
    from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, cute
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
    from cutlass.utils import blackwell_helpers, blockscaled_layout

    element, scale, block, k = (
        (Float4E2M1FN, Float8E4M3FN, 16, 64) if four_bit else (Float8E4M3FN, Float8E8M0FNU, 32, 32)
    )
    major = (OperandMajorMode.K, OperandMajorMode.K)

    def places(layout: Any, rows: int, quarter: int | None) -> np.ndarray:
        r, step, s = np.ogrid[:rows, :4, : k // block]
        if quarter is None:
            coordinate = (((r % ROWS, r // ROWS), (0, s)), 0, step, 0)
        else:
            coordinate = (((r, quarter), (0, s)), 0, step)
        return offset(coordinate, layout.shape, layout.stride)

    def build() -> list[np.ndarray]:
        mma = blackwell_helpers.make_blockscaled_trivial_tiled_mma(
            element, element, *major, scale, block, tcgen05.CtaGroup.ONE, (ROWS, columns)
        )
        tile = (ROWS, columns, 4 * k)
        found = []
        for rows, shared, tensor in (
            (
                ROWS,
                blockscaled_layout.make_smem_layout_sfa,
                blockscaled_layout.make_tmem_layout_sfa,
            ),
            (
                columns,
                blockscaled_layout.make_smem_layout_sfb,
                blockscaled_layout.make_tmem_layout_sfb,
            ),
        ):
            in_shared = shared(mma, tile, block, 1)
            one_stage = cute.slice_(in_shared, (None, None, None, 0))
            in_tensor = tensor(mma, tile, block, one_stage)
            found.append(places(in_shared, rows, None))
            found.extend(places(in_tensor, rows, quarter) for quarter in (0, 3))
        return found

    return evaluate(build, "sm_100a")


@pytest.mark.parametrize(("four_bit", "columns"), [(True, 256), (False, 128)])
def test_scales_in_tensor_memory(four_bit: bool, columns: int) -> None:
    layouts = block_scaled_layouts(four_bit, columns)
    per_row = 4 if four_bit else 1
    for shared, first, last in (layouts[:3], layouts[3:]):
        assert np.array_equal(first + 96 * LANE_BYTES, last)
        rows = len(first)
        codes = np.random.default_rng(0).integers(0, 256, first.shape, dtype=np.uint8)
        content = np.zeros((ROWS, 2048), np.uint8)
        for quarter in range(4):
            content[first // LANE_BYTES + 32 * quarter, first % LANE_BYTES] = codes
        for step in range(4):
            column = int(first[0, step, 0]) // 4
            byte = int(first[0, step, 0]) % 4
            found = scales_of(block_with(content), column, rows, byte, per_row)
            assert np.array_equal(found, codes[:, step])
        # tcgen05.cp: 512 bytes of shared memory are 32 lanes of four columns.
        assert np.array_equal(first // LANE_BYTES, shared % 512 // 16)
        assert np.array_equal(first % 16, shared % 16)
        pieces = np.stack((shared // 512, first % LANE_BYTES // 16), -1).reshape(-1, 2)
        pairs = np.unique(pieces, axis=0)
        assert [len(np.unique(pairs[:, n])) for n in (0, 1)] == [len(pairs)] * 2


def test_operands_of_kind_f16_in_tensor_memory() -> None:
    from cutlass import BFloat16, Float32
    from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
    from cutlass.utils import blackwell_helpers

    def build() -> tuple[np.ndarray, np.ndarray]:
        mma = blackwell_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.ONE,
            (ROWS, 128),
            tcgen05.OperandSource.TMEM,
        )
        a = mma.make_fragment_A(mma.partition_shape_A((ROWS, 64))).layout
        c = mma.make_fragment_C(mma.partition_shape_C((ROWS, 128))).layout
        r, k, n = np.arange(ROWS)[:, None], np.arange(64), np.arange(128)
        in_a = offset(((r, k % 16), 0, k // 16), a.shape, a.stride)
        return in_a, offset(((r, n), 0, 0), c.shape, c.stride)

    in_a, in_c = evaluate(build, "sm_100a")
    values = np.arange(ROWS * 64, dtype=np.uint16).reshape(ROWS, 64)
    content = np.zeros((ROWS, 64), np.uint16)
    content[2 * in_a // LANE_BYTES, 2 * in_a % LANE_BYTES // 2] = values
    for step in range(4):
        found = first_operand(block_with(content), 8 * step, True).view(np.uint16)
        assert np.array_equal(found, values[:, 16 * step : 16 * step + 16])
    lane, column = np.ogrid[:ROWS, :128]
    assert np.array_equal(in_c, (lane << 16) + column)
