"""Problems for the Blackwell products with quantised activations, and their results from logical
codes: independent of the kernels' layouts, addresses and phases.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.ops.quantize_activations import ActivationFormat, QuantizedRows, quantize_rows
from dsv4.weights.native import NATIVE_GROUP
from dsv4.weights.quant import QuantFormat
from tests.ptx.tensor_core import E4M3, block_scaled_mma, e2m1_values

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
POISON = 0xA5
LIMIT = np.float32(10.0)
# Of hidden rows; a power of two that lets some scales saturate.
HIDDEN_GLOBAL = np.float32(2.0**-8)


class Problem(NamedTuple):
    """A product of ``rows`` tokens (dense), or of the pairs of ``tiles`` (expert, pairs).

    ``features`` and ``columns`` are those of a weight, of w1 where the product is gated; ``groups``
    of a block-diagonal one.
    """

    config: ScaledConfig
    rows: int
    features: int
    columns: int
    groups: int = 1
    tiles: tuple[tuple[int, int], ...] = ()
    experts: int = 1
    seed: int = 0


class Operands(NamedTuple):
    """Logical codes and numbers: scales in plain order, weights of experts not interleaved.

    ``weights``: the matrices ``[X, N, K]`` that the product has, w1 and w3 or one.
    """

    rows: Bytes
    row_scale: Bytes
    row_global: Floats | None
    weights: tuple[Bytes, ...]
    weight_scales: tuple[Bytes, ...]
    weight_globals: tuple[Floats, ...]
    slots: NDArray[np.int32]
    routing: Floats

    def arguments(self, problem: Problem) -> list[np.ndarray | None]:
        """What the kernel reads, in the order of its parameters."""
        config = problem.config
        weight = np.concatenate(self.weights, 1)
        scale = np.concatenate(self.weight_scales, 1)
        total = np.stack(self.weight_globals, -1).reshape(-1)
        if config.gated:
            order = np.arange(2 * problem.features).reshape(2, -1, 128).transpose(1, 0, 2).ravel()
            weight = weight[:, order]
            scale = scale[:, order]
        tiles = None
        count = None
        if config.sorted:
            tiles = np.full((len(problem.tiles) + 2, 4), 99, np.int32)
            pairs = np.cumsum([0, *(pairs for _, pairs in problem.tiles)])
            for index, (expert, rows) in enumerate(problem.tiles):
                tiles[index] = expert, pairs[index], rows, 0
            count = np.array([len(problem.tiles)], np.int32)
        return [
            self.rows,
            swizzled(self.row_scale),
            self.row_global,
            weight.copy(),
            np.stack([swizzled(matrix) for matrix in scale]),
            total.copy(),
            tiles,
            count,
            self.slots if config.sorted else None,
            self.routing if config.sorted and config.gated else None,
        ]


def operands(problem: Problem) -> Operands:
    """Random codes of every kind, without NaN; sums of a size that the clamps matter to."""
    config = problem.config
    random = np.random.default_rng(problem.seed)
    nvfp4 = config.format is QuantFormat.NVFP4
    group = NATIVE_GROUP[config.format]
    weight_bits = 8 if config.format is QuantFormat.FP8_BLOCK128 else 4
    stored_rows = problem.rows
    if config.sorted:
        stored_rows = config.tile_tokens * (len(problem.tiles) + 2)
    atom = 64 if nvfp4 else 128
    width = -(-problem.columns // atom) * atom * problem.groups
    matrices = 2 if config.gated else 1
    shape = (problem.experts, problem.features * problem.groups, problem.columns)
    rows = codes(random, (stored_rows, width), 4 if nvfp4 else 8)
    weights = tuple(codes(random, shape, weight_bits) for _ in range(matrices))
    scale_shape = (*shape[:-1], problem.columns // group)
    typical = problem.columns**0.5 * (3 if nvfp4 else 100) * (3 if weight_bits == 4 else 100)
    totals = (random.random((2, problem.experts)) + 0.5) * 12 / typical
    pairs = sum(count for _, count in problem.tiles)
    routing = random.random(pairs + 7, np.float32) * 2
    routing[3] = np.nan
    row_global = None
    if nvfp4:
        row_global = random.random(stored_rows, np.float32) + 0.5
        row_global[stored_rows // 2] = np.nan
    return Operands(
        rows,
        scales(random, (stored_rows, width // group), nvfp4),
        row_global,
        weights,
        tuple(scales(random, scale_shape, nvfp4) for _ in range(matrices)),
        tuple(totals[index].astype(np.float32) for index in range(matrices)),
        random.permutation(pairs + 7)[: max(pairs, 1)].astype(np.int32),
        routing,
    )


def outputs(problem: Problem) -> list[np.ndarray | None]:
    """The buffers of the results, poisoned."""
    config = problem.config
    rows = problem.rows
    if config.sorted:
        rows = config.tile_tokens * (len(problem.tiles) + 2)
    if config.gated:
        nvfp4 = config.format is QuantFormat.NVFP4
        width = problem.features // 2 if nvfp4 else problem.features
        groups = problem.features // (16 if nvfp4 else 32)
        return [
            poisoned((rows, width), np.uint8),
            poisoned((-(-rows // 128) * groups * 128,), np.uint8),
            poisoned((rows,), np.float32) if nvfp4 else None,
        ]
    if config.sorted:
        rows = sum(count for _, count in problem.tiles) + 7
    dtype = np.uint16 if config.out_dtype == torch.bfloat16 else np.float32
    return [poisoned((rows, problem.features * problem.groups), dtype), None, None]


def expected(problem: Problem, given: Operands) -> list[np.ndarray | None]:
    """The poisoned buffers with the results in them."""
    results = outputs(problem)
    for expert, first, position, count in _parts(problem):
        if not count:
            continue
        rows = slice(first, first + count)
        pairs = given.slots[position : position + count]
        if problem.config.gated:
            weight = given.routing[pairs] if problem.config.sorted else np.ones(count, np.float32)
            hidden = _hidden(problem, given, expert, rows, weight)
            _place_hidden(problem, results, rows, hidden)
            continue
        y = results[0]
        assert y is not None
        for part in range(problem.groups):
            into = slice(part * problem.features, (part + 1) * problem.features)
            values = _product(problem, given, expert, rows, 0, part)
            if y.dtype == np.uint16:
                values = _bf16(values)
            y[pairs if problem.config.sorted else rows, into] = values
    return results


def codes(random: np.random.Generator, shape: tuple[int, ...], bits: int) -> Bytes:
    """Random E2M1 pairs (4) or E4M3 codes (8)."""
    if bits == 4:
        return random.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    made = random.integers(0, 256, shape, np.uint8)
    return np.where(made & 127 == 127, np.uint8(0x38), made)


def scales(random: np.random.Generator, shape: tuple[int, ...], e4m3: bool) -> Bytes:
    """Random E4M3 scales from 2^-2 to 2, or E8M0 ones from 2^-3 to 2^2."""
    low, high = (0x28, 0x41) if e4m3 else (124, 130)
    return random.integers(low, high, shape, np.uint8)


def swizzled(scale: Bytes) -> Bytes:
    """Scales ``[R, S]`` in the 128 x 4 order, byte by byte as the formula says."""
    rows, columns = scale.shape
    atoms = -(-columns // 4)
    r, s = np.mgrid[:rows, :columns]
    flat = np.zeros(-(-rows // 128) * atoms * 512, np.uint8)
    flat[_place(r, s, atoms)] = scale
    return flat


def poisoned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """A buffer of which no byte was written."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(count, POISON, np.uint8).view(dtype).reshape(shape)


def _place(r: np.ndarray, s: np.ndarray, atoms: int) -> np.ndarray:
    return (r // 128 * atoms + s // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + s % 4


def _parts(problem: Problem) -> list[tuple[int, int, int, int]]:
    """(expert, first row, first position, rows) of everything that is multiplied."""
    if not problem.config.sorted:
        return [(0, 0, 0, problem.rows)]
    parts = []
    position = 0
    for index, (expert, count) in enumerate(problem.tiles):
        parts.append((expert, index * problem.config.tile_tokens, position, count))
        position += count
    return parts


def _product(
    problem: Problem, given: Operands, expert: int, rows: slice, matrix: int, part: int = 0
) -> Floats:
    """Rows times a matrix, or (``part``) a block of it, with the global scales: float32."""
    nvfp4 = problem.config.format is QuantFormat.NVFP4
    eight = problem.config.format is QuantFormat.FP8_BLOCK128
    group = NATIVE_GROUP[problem.config.format]
    width = given.row_scale.shape[1] // problem.groups
    scale = given.row_scale[rows, part * width : (part + 1) * width]
    values = e2m1_values(given.rows[rows]) if nvfp4 else E4M3[given.rows[rows]]
    values = values[:, part * width * group : (part + 1) * width * group]
    features = slice(part * problem.features, (part + 1) * problem.features)
    if problem.groups == 1:
        features = slice(None)
    weight = given.weights[matrix][expert, features]
    weight = E4M3[weight] if eight else e2m1_values(weight)
    weight_scale = given.weight_scales[matrix][expert, features]
    missing = values.shape[1] - weight.shape[1]
    weight = np.pad(weight, ((0, 0), (0, missing)))
    weight_scale = np.pad(weight_scale, ((0, 0), (0, missing // group)))
    start = np.zeros((len(values), len(weight)), np.float32)
    kind = "mxf4nvf4" if nvfp4 else "mxf8f6f4"
    format = "ue4m3" if nvfp4 else "ue8m0"
    sums = block_scaled_mma(start, values, weight, scale, weight_scale, kind, format)
    factor = given.weight_globals[matrix][expert]
    if given.row_global is not None:
        factor = (given.row_global[rows] * factor)[:, None]
    return sums * factor


def _hidden(
    problem: Problem, given: Operands, expert: int, rows: slice, weight: Floats
) -> QuantizedRows:
    """Gated hidden rows, quantised as activations are."""
    gate, up = (_product(problem, given, expert, rows, matrix) for matrix in range(2))
    gate = np.minimum(gate, LIMIT)
    up = np.maximum(np.minimum(up, LIMIT), -LIMIT)
    with np.errstate(over="ignore"):
        power = np.exp2(gate * np.float32(-1.4426950408889634))
    hidden = gate / (np.float32(1) + power) * up * weight[:, None]
    rounded = torch.from_numpy(hidden).bfloat16()
    if problem.config.format is QuantFormat.NVFP4:
        return quantize_rows(rounded, ActivationFormat.NVFP4, float(HIDDEN_GLOBAL))
    return quantize_rows(rounded, ActivationFormat.FP8)


def _place_hidden(
    problem: Problem, results: list[np.ndarray | None], rows: slice, hidden: QuantizedRows
) -> None:
    codes, scale, total = results
    assert codes is not None
    assert scale is not None
    codes[rows] = hidden.codes.numpy()
    plain = hidden.scales.numpy()
    r, s = np.mgrid[rows, : plain.shape[1]]
    scale[_place(r, s, plain.shape[1] // 4)] = plain
    if total is not None:
        total[rows] = HIDDEN_GLOBAL


def _bf16(values: Floats) -> NDArray[np.uint16]:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
