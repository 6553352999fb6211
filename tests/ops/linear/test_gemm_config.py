"""Which configuration a Blackwell product with 16-bit activations takes, and why there is none."""

import pytest
import torch

from dsv4.ops.linear.cutedsl.gemm_config import (
    TENSOR_COLUMNS,
    Rejected,
    W16Config,
    W16Problem,
    budget,
    w16_config,
    w16_configs,
)
from tests.ops.linear.blackwell_problems import configurations, problems
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4

DENSE = W16Problem(NVFP4, torch.bfloat16, 512, 1024, 4096)


def test_every_configuration_fits_a_multiprocessor() -> None:
    """Also those that published shapes do not take. Enough stages that copies run ahead."""
    for base in configurations():
        for format in (NVFP4, MXFP4, FP8, BF16):
            for tile_tokens in (64, 128):
                for sides in (2,) if base.gated else (1, 2):
                    config = base._replace(format=format, tile_tokens=tile_tokens, sides=sides)
                    found = budget(config)
                    columns = found.accumulators * sides * tile_tokens
                    assert columns + found.fragments * sides * 32 <= TENSOR_COLUMNS
                    assert found.stages >= 4, config
                    # No decoding group meets a stage that the other one still waits for.
                    assert found.stages % 2 == 0 or found.stages >= found.fragments + 2, config
                    assert found.fragments >= 4, config
                    # The registers that the compiler may give a thread: 128 at least.
                    assert config.threads <= 512


def test_published_products_have_a_kernel_from_128_tokens_on() -> None:
    for name, problem in problems():
        found = w16_config(problem, "sm_103a", 148)
        dense = not problem.gated and not problem.experts
        assert isinstance(found, Rejected) == (dense and problem.tokens < 128), (name, problem)


def test_choice() -> None:
    """Two sides share tokens where enough work tiles remain; short experts have half tiles."""

    def tile(problem: W16Problem) -> tuple[int, int]:
        found = w16_config(problem, "sm_100a", 148)
        assert isinstance(found, W16Config)
        return found.tile_tokens, found.sides

    assert tile(DENSE) == (64, 1)
    assert tile(DENSE._replace(features=4096)) == (128, 1)
    assert tile(DENSE._replace(features=32768)) == (128, 2)
    assert tile(DENSE._replace(features=128, tokens=1 << 16)) == (128, 1)
    experts = DENSE._replace(experts=256, tokens=512 * 6, out_dtype=torch.float32)
    assert tile(experts) == (64, 2)
    assert tile(experts._replace(tokens=4096 * 6)) == (128, 2)
    assert tile(DENSE._replace(gated=True, tokens=9)) == (64, 2)


@pytest.mark.parametrize(
    ("problem", "architecture", "reasons"),
    [
        (DENSE, "sm_90a", ["sm_90a has no tcgen05"]),
        (
            DENSE._replace(format=FP8, exact_scales=False),
            "sm_100a",
            ["FP8 block scales that are not all powers of two"],
        ),
        (
            DENSE._replace(features=20, groups=2),
            "sm_100a",
            ["groups of 20 rows, which share row tiles of 16"],
        ),
        (
            DENSE._replace(tokens=127),
            "sm_90a",
            ["sm_90a has no tcgen05", "127 tokens of a dense product, fewer than 128"],
        ),
    ],
)
def test_reasons(problem: W16Problem, architecture: str, reasons: list[str]) -> None:
    found = w16_config(problem, architecture, 148)
    assert found == Rejected(tuple(reasons))
    assert str(found) == ", ".join(reasons)


def test_scales_matter_to_fp8_only() -> None:
    assert isinstance(w16_config(DENSE._replace(exact_scales=False), "sm_100a", 148), W16Config)


def test_configurations_of_all_shorter_chunks() -> None:
    """Those of every number of tokens that a recording for the longest serves."""
    problem = DENSE._replace(tokens=4096, features=4096)
    found = w16_configs(problem, "sm_100a", 148)
    tiles = {(config.tile_tokens, config.sides) for config in found}
    assert tiles == {(64, 1), (128, 1), (128, 2)}
    assert w16_configs(problem._replace(tokens=100), "sm_100a", 148) == frozenset()
    experts = problem._replace(experts=8, tokens=4096 * 6)
    found = w16_configs(experts, "sm_100a", 148, rows_per_token=6)
    assert {config.tile_tokens for config in found} == {64, 128}
