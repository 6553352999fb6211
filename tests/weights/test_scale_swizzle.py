"""The order of block scales is the published one, that of torchao and that of CuTe's layouts."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from dsv4.weights.scale_swizzle import swizzle_block_scale, unswizzle_block_scale

SHAPES = [(1, 1), (31, 3), (33, 5), (128, 4), (129, 4), (200, 9), (300, 28)]
STACKS = [(1,), (3,), (2, 3)]


def random_scales(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)


def in_tiles(scale: Tensor) -> Tensor:
    """torchao's order (``to_blocked``): tiles of 128 × 4 row by row, the four quarters of a tile,
    32 × 4 each, side by side.
    """
    rows, columns = scale.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
    padded[:rows, :columns] = scale
    tiles = [tile for band in padded.split(128) for tile in band.split(4, 1)]
    return torch.cat([torch.cat(tile.split(32), 1).flatten() for tile in tiles])


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle_is_that_of_torchao(shape: tuple[int, int]) -> None:
    scale = random_scales(*shape)
    assert torch.equal(swizzle_block_scale(scale), in_tiles(scale))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("shape", SHAPES[:5])
def test_matrices_of_a_stack_are_swizzled_one_by_one(
    stack: tuple[int, ...], shape: tuple[int, int]
) -> None:
    scale = random_scales(*stack, *shape)
    swizzled = swizzle_block_scale(scale)
    alone = [in_tiles(matrix) for matrix in scale.view(-1, *shape)]
    assert torch.equal(swizzled, torch.stack(alone).view(*stack, -1))
    assert torch.equal(unswizzle_block_scale(swizzled, *shape), scale)


def test_stacks_may_be_empty_or_without_memory() -> None:
    none = torch.empty(0, 129, 5, dtype=torch.uint8)
    assert swizzle_block_scale(none).shape == (0, 2048)
    assert unswizzle_block_scale(swizzle_block_scale(none), 129, 5).shape == none.shape
    assert swizzle_block_scale(none.to("meta")).device.type == "meta"


def cute_offsets(rows: int, columns: int, stack: int, block: int) -> Tensor:
    """Where CuTe's layout of block scales has those of ``[X, R, S]``: int64, the same shape."""
    import cutlass
    from cutlass import cute
    from cutlass.utils.blockscaled_layout import tile_atom_to_shape_SF

    found = []

    @cute.jit
    def evaluate(rows: cutlass.Constexpr, k: cutlass.Constexpr, stack: cutlass.Constexpr) -> None:
        layout = tile_atom_to_shape_SF((rows, k, stack), block)
        found.extend(
            [cute.crd2idx((r, s * block, x), layout) for s in range(k // block)]
            for x in range(stack)
            for r in range(rows)
        )

    evaluate(rows, columns * block, stack)
    return torch.tensor(found).view(stack, rows, columns)


@pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "columns", "stack", "block"),
    [(1, 1, 1, 16), (33, 5, 1, 32), (128, 8, 1, 16), (130, 7, 3, 16), (300, 4, 2, 32)],
)
def test_swizzle_is_the_layout_of_cute(rows: int, columns: int, stack: int, block: int) -> None:
    scale = random_scales(stack, rows, columns)
    offsets = cute_offsets(rows, columns, stack, block)
    assert torch.equal(swizzle_block_scale(scale).flatten()[offsets], scale)
