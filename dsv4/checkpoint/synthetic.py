"""Random weights of any geometry: in memory for measurements, as a checkpoint folder for tests.

Magnitudes keep activations near 1 through the depth of the model: matrices have a standard
deviation near 1/√K, norms are near 1. Quantised matrices are drawn as codes, so that nothing larger
than the result is ever allocated.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from dsv4.checkpoint.layouts import Layout, check_layout, format_in
from dsv4.checkpoint.load import Weights
from dsv4.checkpoint.names import Dialect
from dsv4.checkpoint.weights_folder import write_weights
from dsv4.checkpoint.writer import DEFAULT_SHARD_BYTES
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.parallel.sharding import check_divisible, local_parameters
from dsv4.weights.codes import exponent_to_e8m0
from dsv4.weights.parameters import MtpKind, Parameter, Role, parameters
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes

# Root mean square of the 16 E2M1 values, which random bytes hit equally often.
_E2M1_RMS = 2.926
_FP8_RMS = 64.0


def synthetic_weights(
    config: ModelConfig,
    layout: Layout,
    seed: int,
    device_of: Callable[[str], torch.device],
    mtp: MtpKind | None = None,
) -> Weights:
    """Random parameters of ``config`` in the formats of ``layout``: the same type of result as
    ``load_weights``.

    Drawn on the device itself, in the order of ``parameters``; equal arguments give equal bytes on
    one kind of device.
    """
    check_layout(layout)
    generators: dict[torch.device, Generator] = {}
    weights: Weights = {}
    for name, parameter in parameters(config, mtp).items():
        device = device_of(name)
        if device not in generators:
            generators[device] = Generator(device).manual_seed(seed)
        weights[name] = random_parameter(parameter, config, layout, generators[device])
    return weights


def synthetic_rank_weights(
    config: ModelConfig,
    layout: Layout,
    seed: int,
    device: torch.device,
    ranks: int,
    rank: int,
    mtp: MtpKind | None = None,
) -> Weights:
    """What ``rank`` of ``ranks`` holds of random parameters, drawn in the shapes of its parts, for
    models that no device holds whole: the same type of result as ``load_ranks``, on ``device``.

    What is whole is the same on every rank, so that ranks agree on all that each computes for
    itself. Parts differ between ranks; they are not those of ``synthetic_weights``. Raises
    ``UserError`` for a model that cannot be cut for so many ranks.
    """
    check_layout(layout)
    whole = parameters(config, mtp)
    formats = ((parameter, format_in(layout, parameter)) for parameter in whole.values())
    check_divisible(config, formats, ranks)
    of_all = Generator(device).manual_seed(seed)
    of_rank = Generator(device).manual_seed(seed + 1 + rank)
    weights: Weights = {}
    for name, local in local_parameters(config, ranks, rank, mtp).items():
        is_cut = local != whole[name]
        inputs = whole[name].shape[-1]
        generator = of_rank if is_cut else of_all
        weights[name] = random_parameter(local, config, layout, generator, inputs)
    return weights


def random_parameter(
    parameter: Parameter,
    config: ModelConfig,
    layout: Layout,
    generator: Generator,
    inputs: int | None = None,
) -> QuantTensor | Tensor:
    """One random parameter in its format of ``layout``, on the generator's device. ``inputs``: what
    a matrix multiplies, where it is a part of it. Raises ``UserError`` for a shape that the format
    cannot hold.
    """
    format = format_in(layout, parameter)
    if format is None:
        return _random_plain(parameter, config, layout, generator)
    shape = parameter.shape
    try:
        packed = packed_shapes(format, shape)
    except ValueError as error:
        raise UserError(f"{parameter.name}: {error}") from None
    return _random_matrix(shape, packed, format, generator, inputs or shape[-1])


def write_synthetic(
    folder: str | Path,
    raw_config: dict[str, Any],
    layout: Layout,
    seed: int,
    *,
    names: Dialect = Dialect.NATIVE,
    mtp: MtpKind | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a folder of random weights. The CPU draws them, which takes some 10 s per GB.

    Raises ``UserError`` for an invalid config, a width that a format of the layout cannot hold, or
    an existing folder.
    """
    config = ModelConfig.from_dict(raw_config)
    weights = synthetic_weights(config, layout, seed, lambda _: torch.device("cpu"), mtp)
    write_weights(
        folder, raw_config, layout, weights, names=names, mtp=mtp, shard_bytes=shard_bytes
    )


def _random_plain(
    parameter: Parameter, config: ModelConfig, layout: Layout, generator: Generator
) -> Tensor:
    shape = parameter.shape
    device = generator.device
    if parameter.role is Role.TABLE:
        size = (shape[0], config.n_routed_experts)
        rows = torch.rand(size, generator=generator, device=device, dtype=torch.float32)
        return rows.argsort(dim=-1)[:, : shape[1]].contiguous()
    noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if parameter.role is Role.NORM:
        return (1 + 0.1 * noise).to(torch.float32 if layout == "f32" else torch.bfloat16)
    if parameter.name.endswith("_fn"):
        return noise / math.sqrt(shape[-1])
    return 1 + 0.1 * noise if parameter.name.endswith("_scale") else 0.5 * noise


def _random_matrix(
    shape: tuple[int, ...],
    packed: dict[str, tuple[int, ...] | None],
    format: QuantFormat,
    generator: Generator,
    inputs: int,
) -> QuantTensor:
    """Values of standard deviation near 1/√``inputs``; block scales vary by factors of 2, so that a
    misplaced one is seen. ``packed``: ``packed_shapes`` of them.
    """
    device = generator.device
    std = 1 / math.sqrt(inputs)
    if format in (QuantFormat.BF16, QuantFormat.F32):
        dtype = torch.bfloat16 if format is QuantFormat.BF16 else torch.float32
        return QuantTensor.dense(
            torch.empty(shape, dtype=dtype, device=device).normal_(0, std, generator=generator)
        )
    assert packed["data"] is not None
    assert packed["block_scale"] is not None
    steps = torch.randint(
        -1, 2, packed["block_scale"], generator=generator, device=device, dtype=torch.int32
    )
    if format is QuantFormat.FP8_BLOCK128:
        noise = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(
            0, _FP8_RMS, generator=generator
        )
        data = noise.clamp_(-448, 448).to(torch.float8_e4m3fn)
        return QuantTensor(
            data, exponent_to_e8m0(steps + round(math.log2(std / _FP8_RMS))), None, format, shape
        )
    data = torch.randint(
        0, 256, packed["data"], generator=generator, device=device, dtype=torch.uint8
    )
    if format is QuantFormat.MXFP4:
        return QuantTensor(
            data, exponent_to_e8m0(steps + round(math.log2(std / _E2M1_RMS))), None, format, shape
        )
    block_scale = torch.exp2(steps.float()).to(torch.float8_e4m3fn)
    total = torch.full(
        packed["global_scale"] or (), std / _E2M1_RMS, dtype=torch.float32, device=device
    )
    return QuantTensor(data, block_scale, total, format, shape)
