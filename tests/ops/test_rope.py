"""Rotary embedding: interleaved pairs, two tables, inverse rotation."""

import pytest
import torch

from dsv4.ops import Ops
from dsv4.ops.rope import layer_inv_freq
from tests.ops.cases import HEAD_DIM, VECTORS, assert_rounded_once, exact_rope, inv_freq, normal, positions, tiny_config

POSITIONS = (0, 1, 5, 127, 4096, 65_537, 1_000_000)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotates_pairs_as_complex_numbers(ops: Ops, ratio: int, inverse: bool, dtype: torch.dtype) -> None:
    x_THD = normal(len(POSITIONS), 3, HEAD_DIM, seed=1, dtype=dtype)
    out = ops.rope(x_THD, positions(*POSITIONS), inv_freq(ratio), inverse=inverse)
    assert out.dtype == dtype
    for x, rotated, position in zip(x_THD, out, POSITIONS, strict=True):
        assert_rounded_once(rotated, exact_rope(x, position, inv_freq(ratio), inverse))


@pytest.mark.parametrize(("ratio", "name"), [(0, "inv_freq_swa_theta1e4"), (4, "inv_freq_compress_theta16e4_yarn16")])
def test_tables_are_the_published_ones(ratio: int, name: str) -> None:
    torch.testing.assert_close(inv_freq(ratio), torch.tensor(VECTORS[name]), rtol=5e-7, atol=0)


def test_published_example(ops: Ops) -> None:
    example = VECTORS["rope_example"]
    x = torch.zeros(1, HEAD_DIM)
    x[0, -64:-60] = torch.tensor(example["inp"])
    out = ops.rope(x, positions(5), inv_freq(4))[0, -64:-60]
    torch.testing.assert_close(out, torch.tensor(example["out"]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("ratio", [4, 128])
def test_spec11_a01_compressed_layers_use_the_compress_table_for_everything(ratio: int) -> None:
    assert torch.equal(layer_inv_freq(tiny_config(), ratio), layer_inv_freq(tiny_config(rope_theta=777.0), ratio))
    assert not torch.equal(inv_freq(ratio), inv_freq(0))
