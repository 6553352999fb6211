"""Rotary embedding: interleaved pairs, two tables, inverse rotation, angles of long contexts."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from dsv4.config import Yarn
from dsv4.ops import rope as reference
from dsv4.ops.rope import layer_inv_freq, rope
from tests.ops import forms
from tests.ops.cases import (
    ELEMENTWISE,
    EPS,
    HEAD_DIM,
    VECTORS,
    assert_rounded_once,
    exact_rope,
    integers,
    inv_freq,
    normal,
    positions,
    tiny_config,
)
from tests.ops.rounding import assert_rounded_twice

POSITIONS = (0, 1, 5, 127, 4096, 65_537, 1_048_575)


def exact_yarn(theta: float, width: int, yarn: Yarn) -> list[float]:
    """Blend of theta^(−2i/width) and the same over ``factor``, by the ramp between two correction
    dimensions.
    """

    def correction(rotations: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(wavelengths) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), width - 1)
    found = []
    for i in range(width // 2):
        base = theta ** (-2 * i / width)
        ramp = min(max((i - low) / (high - low if high > low else 0.001), 0.0), 1.0)
        found.append(base / yarn.factor * ramp + base * (1 - ramp))
    return found


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(HEAD_DIM,), (3, HEAD_DIM), (2, 128), (64,)])
def test_rotates_pairs_as_complex_numbers(
    ratio: int, inverse: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = normal(len(POSITIONS), *shape, seed=1, dtype=dtype)
    out = rope(x, positions(*POSITIONS), inv_freq(ratio), inverse=inverse)
    assert out.dtype == dtype
    assert torch.equal(out[..., :-64], x[..., :-64]), "only the last 64 dimensions turn"
    for row, rotated, position in zip(x, out, POSITIONS, strict=True):
        exact = exact_rope(row, position, inv_freq(ratio), inverse)
        assert_rounded_once(rotated, exact, ELEMENTWISE)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["normal", "where_eps_matters"])
def test_query_rope_normalises_every_head_then_rotates(
    backend: str, ratio: int, dtype: torch.dtype, size: float
) -> None:
    frequencies = inv_freq(ratio)
    q_THD = normal(len(POSITIONS), 3, HEAD_DIM, seed=7, dtype=dtype, scale=size)
    q_THD = (q_THD.float() * torch.tensor([0.1, 1.0, 40.0])[:, None]).to(dtype)
    query_rope = forms.part(backend, reference.query_rope, forms.query_rope)
    out_THD = query_rope(q_THD, positions(*POSITIONS), frequencies, EPS)
    assert out_THD.dtype == dtype
    for position, out_HD, q_HD in zip(POSITIONS, out_THD, q_THD.double(), strict=True):
        normalised = q_HD * (q_HD.square().mean(-1, keepdim=True) + EPS) ** -0.5
        for out, head in zip(out_HD, normalised, strict=True):
            assert_rounded_twice(
                out, head, lambda value, at=position: exact_rope(value, at, frequencies)
            )


@pytest.mark.parametrize(
    ("ratio", "name"), [(0, "inv_freq_swa_theta1e4"), (4, "inv_freq_compress_theta16e4_yarn16")]
)
def test_tables_are_the_published_ones(ratio: int, name: str) -> None:
    assert inv_freq(ratio).dtype == torch.float32
    assert inv_freq(ratio).tolist() == pytest.approx(VECTORS[name], rel=5e-7)


@pytest.mark.parametrize(
    "yarn",
    [
        Yarn(16, 65536, 32, 1),
        Yarn(4, 4096, 32, 1),
        Yarn(2, 64, 32, 1),
        Yarn(2, 65536, 32, 1e-7),
        Yarn(2, 64, 32, 12),
    ],
    ids=["published", "short", "low_clamped", "high_clamped", "low_is_high"],
)
def test_yarn_equals_the_formula(yarn: Yarn) -> None:
    config = dataclasses.replace(tiny_config(), yarn=yarn)
    assert layer_inv_freq(config, 4).tolist() == pytest.approx(
        exact_yarn(160000, 64, yarn), rel=1e-6
    )


def test_published_example() -> None:
    example = VECTORS["rope_example"]
    x = torch.zeros(1, HEAD_DIM)
    x[0, -64:-60] = torch.tensor(example["inp"])
    out = rope(x, positions(5), inv_freq(4))[0, -64:-60]
    assert out.tolist() == pytest.approx(example["out"], abs=2e-6)


@pytest.mark.parametrize("ratio", [4, 128])
def test_lesson_02_one_table_per_layer_by_its_ratio(ratio: int) -> None:
    """Compressed layers depend on compress_rope_theta alone, window-only layers on rope_theta
    alone.
    """
    config = tiny_config()
    other_main = tiny_config(rope_theta=777.0)
    other_compress = tiny_config(compress_rope_theta=777.0)
    assert torch.equal(layer_inv_freq(config, ratio), layer_inv_freq(other_main, ratio))
    assert torch.equal(layer_inv_freq(config, 0), layer_inv_freq(other_compress, 0))
    assert not torch.equal(layer_inv_freq(config, ratio), layer_inv_freq(other_compress, ratio))
    assert not torch.equal(layer_inv_freq(config, 0), layer_inv_freq(other_main, 0))


def test_lesson_03_yarn_scales_the_compress_table_only_and_not_the_vectors() -> None:
    plain = dataclasses.replace(tiny_config(), yarn=None)
    assert torch.equal(layer_inv_freq(tiny_config(), 0), layer_inv_freq(plain, 0))
    assert not torch.equal(layer_inv_freq(tiny_config(), 4), layer_inv_freq(plain, 4))
    x = normal(1, HEAD_DIM, seed=2)
    out = rope(x, positions(12_345), inv_freq(4))
    torch.testing.assert_close(out.norm(), x.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("ratio", [4, 128])
def test_spec11_a01_compressed_layers_turn_with_theta_160000(ratio: int) -> None:
    assert float(inv_freq(ratio)[1]) == pytest.approx(160000 ** (-2 / 64), rel=1e-6)
    assert float(inv_freq(ratio)[31]) == pytest.approx(160000 ** (-62 / 64) / 16, rel=1e-6)


def test_spec11_a02_window_layers_turn_with_theta_10000_without_yarn() -> None:
    exact = [10000 ** (-2 * i / 64) for i in range(32)]
    assert inv_freq(0).tolist() == pytest.approx(exact, rel=1e-6)


def test_spec11_a05_pairs_are_neighbours_not_halves() -> None:
    """A quarter turn takes (a, b) to (−b, a) in dimensions 0 and 1; a half-split rotation pairs 0
    with 32.
    """
    x = torch.zeros(1, 128)
    quarter = torch.zeros(32)
    x[0, 64] = 1.0
    x[0, 65] = 2.0
    quarter[0] = math.pi / 2
    out = rope(x, positions(1), quarter)[0]
    assert out[64:66].tolist() == pytest.approx([-2.0, 1.0], abs=1e-6)
    assert out[66:].tolist() == pytest.approx([0.0] * 62, abs=1e-6)


def test_inverse_undoes_the_rotation() -> None:
    x = normal(3, 2, HEAD_DIM, seed=3)
    position_T = positions(0, 17, 999_999)
    back = rope(rope(x, position_T, inv_freq(4)), position_T, inv_freq(4), inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)


def test_dot_products_depend_on_the_distance() -> None:
    q = normal(1, HEAD_DIM, seed=4)
    k = normal(1, HEAD_DIM, seed=5)

    def product(query_position: int, key_position: int) -> Tensor:
        turned = (
            rope(x, positions(p), inv_freq(0)).double()
            for x, p in ((q, query_position), (k, key_position))
        )
        return (next(turned) * next(turned)).sum()

    torch.testing.assert_close(product(120, 100), product(20, 0), rtol=0, atol=3e-5)


def test_angle_is_the_float32_product() -> None:
    """At a million tokens the float32 product differs from the exact angle by up to 0.03;
    model.md#rope wants float32.
    """
    position = 999_983
    frequencies = inv_freq(4)
    x = torch.zeros(1, 64)
    x[0, ::2] = 1.0
    turned = rope(x, positions(position), frequencies)[0].double().unflatten(0, (-1, 2))
    single = (torch.tensor(float(position)) * frequencies).double()
    exact = position * frequencies.double()
    assert float((single - exact).abs().max()) > 0.01
    torch.testing.assert_close(turned[:, 0], single.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[:, 1], single.sin(), rtol=0, atol=1e-6)


def test_no_tokens_and_whole_numbers_at_position_zero() -> None:
    assert rope(torch.empty(0, 2, 128), positions(), inv_freq(4)).shape == (0, 2, 128)
    x = integers(-9, 9, 1, 128, seed=6, dtype=torch.bfloat16)
    assert torch.equal(rope(x, positions(0), inv_freq(4)), x)
