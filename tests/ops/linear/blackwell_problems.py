"""Products of published geometries with 16-bit activations, and the configurations they take."""

from collections.abc import Iterator

import torch

from dsv4.ops.linear.cutedsl.gemm_config import (
    W16Config,
    W16Problem,
    w16_config,
)
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4

ARCHITECTURES = ("sm_100a", "sm_103a")
MULTIPROCESSORS = 148
TOKENS = (16, 512, 4096)
PER_TOKEN = 6
# Width, rows of an expert's hidden layer, experts; (N, K) of dense products, (G, R, K) of o_a.
GEOMETRIES = {
    "Flash": (
        (4096, 2048, 256),
        [(1024, 4096), (512, 4096), (32768, 1024), (8192, 1024), (4096, 8192), (4096, 2048)],
        (8, 1024, 4096),
    ),
    "Pro": (
        (7168, 3072, 384),
        [(1536, 7168), (512, 7168), (65536, 1536), (8192, 1536), (7168, 16384), (7168, 3072)],
        (16, 1024, 4096),
    ),
}


def problems() -> Iterator[tuple[str, W16Problem]]:
    """Every product of a layer, by name of its geometry."""
    for name, ((width, inner, experts), matrices, (groups, rows, columns)) in GEOMETRIES.items():
        for tokens in TOKENS:
            for format in (NVFP4, FP8, BF16):
                for features, k in matrices:
                    for dtype in (torch.bfloat16, torch.float32):
                        yield name, W16Problem(format, dtype, tokens, features, k)
                yield (
                    name,
                    W16Problem(format, torch.bfloat16, tokens, rows, columns, groups=groups),
                )
                yield name, W16Problem(format, torch.bfloat16, tokens, inner, width, gated=True)
            for format in (NVFP4, MXFP4):
                pairs = tokens * PER_TOKEN
                gate_up = W16Problem(format, torch.bfloat16, pairs, inner, width, gated=True)
                yield name, gate_up._replace(experts=experts)
                down = W16Problem(format, torch.float32, pairs, width, inner, experts=experts)
                yield name, down


def configurations() -> list[W16Config]:
    """What those products are compiled for, each once."""
    found = []
    for _, problem in problems():
        config = w16_config(problem, ARCHITECTURES[0], MULTIPROCESSORS)
        if isinstance(config, W16Config) and config not in found:
            found.append(config)
    return found


def identifier(config: W16Config) -> str:
    """A short name for a test."""
    role = "gate_up" if config.gated else "down" if config.sorted else "dense"
    if config.gated and not config.sorted:
        role = "shared"
    dtype = "bf16" if config.out_dtype == torch.bfloat16 else "f32"
    return f"{role}-{config.format.value}-{dtype}-{config.tile_tokens}x{config.sides}"
