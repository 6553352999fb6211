"""Every product of Flash and Pro layers that may take native weights, and the kernels of these."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dsv4.ops.linear.cutedsl.gemm_config import Rejected
from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig, ScaledProblem, scaled_config
from dsv4.weights.quant import QuantFormat

FORMATS = (QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4)
MULTIPROCESSORS = 148


class Geometry(NamedTuple):
    """Sizes of a model: hidden rows, query rank, heads of 512, output groups, expert rows."""

    width: int
    query_rank: int
    heads: int
    groups: int
    inner: int


FLASH = Geometry(4096, 1024, 64, 8, 2048)
PRO = Geometry(7168, 1536, 128, 16, 3072)


def problems(geometry: Geometry) -> Iterator[ScaledProblem]:
    """Every product of a layer that may take native weights, for short and long steps."""
    width, query_rank, heads, groups, inner = geometry
    dense = (
        (query_rank, width),
        (heads * 512, query_rank),
        (512, width),
        (64 * 128, query_rank),
        (width, groups * 1024),
        (width, inner),
    )
    for format in FORMATS:
        for tokens in (64, 512, 4096, 16384):
            for features, columns in dense:
                yield ScaledProblem(format, torch.bfloat16, tokens, features, columns)
            yield ScaledProblem(format, torch.float32, tokens, width, inner)
            yield ScaledProblem(format, None, tokens, inner, width)
            yield ScaledProblem(format, torch.float32, tokens, width, inner, sorted=True)
            yield ScaledProblem(format, None, tokens, inner, width, sorted=True)
            if format is not QuantFormat.NVFP4:
                columns = heads * 512 // groups
                yield ScaledProblem(format, torch.bfloat16, tokens, 1024, columns, groups)


def configurations() -> list[ScaledConfig]:
    """The kernels of all these products; pairs of CTAs for sorted rows, too."""
    found = set()
    for geometry in (FLASH, PRO):
        for problem in problems(geometry):
            config = scaled_config(problem, "sm_100a", MULTIPROCESSORS)
            assert not isinstance(config, Rejected), (problem, str(config))
            found |= {config, config._replace(pair=config.pair or config.sorted)}
    return sorted(found, key=repr)


def name(config: ScaledConfig) -> str:
    role = "gate_up" if config.gated else str(config.out_dtype)[len("torch.") :]
    order = "sorted" if config.sorted else "dense"
    size = f"{config.tile_tokens}x{config.tile_features}"
    return f"{config.format.value}-{role}-{order}-{size}"
