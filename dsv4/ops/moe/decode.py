"""Mixture of experts on the GPU: one launch routes and computes a decode step; longer ones are routed first, then take
grouped GEMMs (``moe_prefill``).
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.loader import Defines, Launch, multiprocessors, prepare, zeroed_counters
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.prefill import moe_prefill
from dsv4.ops.remembered import layouts, remembered
from dsv4.ops.router import Router
from dsv4.ops.router.cuda import MAX_EXPERTS, check_router, route, selection_arguments, selection_defines
from dsv4.quant import QuantFormat, QuantTensor
from dsv4.weights.packed import PackedWeight, chunk_columns, padded

MAX_DECODE_TOKENS = 8
# The grid barrier's four and two per word of the score exchange. All shapes share them, so that the number of a launch,
# which marks its words, is its own.
COUNTERS = 4 + 2 * MAX_DECODE_TOKENS * MAX_EXPERTS
_FORMAT_CODE = {QuantFormat.NVFP4: 0, QuantFormat.MXFP4: 1, QuantFormat.FP8_BLOCK128: 2, QuantFormat.BF16: 3}
_STAGE_LOADS, _LOAD_BYTES = 4, 512
# Of the parts of the scratch memory.
_ALIGNMENT = 512
# Dynamic shared memory a block may use: 227 KB less the kernels' static tables.
_SHARED_LIMIT, _SHARED_LEAST = (227 << 10) - (8 << 10), 114 << 10


@dataclass(frozen=True)
class Tuning:
    """Launch shape of the decode kernel: warps per block, ring depth (stages per warp)."""

    warps: int = 12
    stages: int = 2


# By padded token count.
_TUNING = {1: Tuning(12, 2), 2: Tuning(12, 2), 4: Tuning(12, 2), 8: Tuning(16, 1)}


class Decoded(NamedTuple):
    """What a decode launch returns: the result ``[T, E]`` and the routes, int64 and float32 ``[T, P]``."""

    y_TE: Tensor
    ids_TP: Tensor
    weights_TP: Tensor


class DecodeStep(NamedTuple):
    """Arguments of one launch, x and token ids contiguous and x at a multiple of 16 bytes."""

    x_TE: Tensor
    tokens_T: Tensor
    router: Router[PackedWeight]
    experts: ExpertWeights[PackedWeight]
    shared: ExpertWeights[PackedWeight]
    limit: float
    tuning: Tuning

    @property
    def formats(self) -> tuple[QuantFormat, QuantFormat]:
        """Of the routed and the shared experts."""
        return _formats(self.experts, self.shared)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """T, P, X, E, F."""
        count, inner, width = self.experts.w1.shape
        return self.x_TE.shape[0], self.router.experts_per_token, count, width, inner

    @property
    def stages(self) -> int:
        """Ring depth that fits."""
        return _ring_depth(self.sizes[0], self.sizes[3], self.formats, self.tuning)

    @property
    def defines(self) -> Defines:
        columns = max(map(_stage_columns, self.formats))
        _, _, count, width, _ = self.sizes
        row_pairs, blocks = -(-count // 16) * 8, multiprocessors(self.x_TE.device)
        vectors = -(-width // columns) * columns // 8
        return (
            *selection_defines(self.router),
            ("GATE_ROUNDS", -(-row_pairs // blocks)),
            ("VECTORS", -(-vectors // (32 * self.tuning.warps))),
            ("ROUTED", _FORMAT_CODE[self.formats[0]]),
            ("SHARED", _FORMAT_CODE[self.formats[1]]),
            ("TOKENS", _padded_tokens(self.x_TE.shape[0])),
            ("TAILS", int(any(size % columns for size in self.sizes[3:]))),
            ("WARPS", self.tuning.warps),
            ("STAGES", self.stages),
        )


def moe(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Tensor:
    """``dsv4.ops.moe.moe`` for bfloat16 x: bfloat16 ``[T, E]``, float32 sums in a fixed order, one final rounding.

    Routes as ``dsv4.ops.router.cuda.route``; packed expert weights. An id outside [0, X) adds nothing. Steps of up to
    8 tokens take one launch, whose blocks all have to be resident at once: on one device, such launches must not run
    at the same time on several streams. Hidden values below 2^-31 of limit² · max(1, Σ weights) of a token lose bits.
    Raises ``ValueError`` for anything else than the above.
    """
    tokens = x_TE.shape[0]
    if 1 <= tokens <= MAX_DECODE_TOKENS:
        step = _step(x_TE, tokens_T, router, experts, shared, limit, None)
        decode = _prepared(step)
        return _in_halves(step).y_TE if decode is None else decode(step)[0]
    check_router(x_TE, tokens_T, router)
    _check_experts(x_TE, router, experts, shared)
    if tokens == 0:
        return torch.empty_like(x_TE)
    ids_TP, weights_TP = route(x_TE, tokens_T, router)
    return moe_prefill(x_TE, ids_TP, weights_TP, experts, shared, limit)


def moe_decode(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
    tuning: Tuning | None = None,
) -> Decoded:
    """``moe`` for 1 to 8 tokens, with the routes. ``tuning`` changes only the order of the sums."""
    step = _step(x_TE, tokens_T, router, experts, shared, limit, tuning)
    decode = _prepared(step)
    return _in_halves(step) if decode is None else decode.with_routes(*decode(step))


def _step(
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
    tuning: Tuning | None,
) -> DecodeStep:
    x_TE, tuning = x_TE.contiguous(), tuning or _TUNING[_padded_tokens(x_TE.shape[0])]
    if x_TE.data_ptr() % 16:
        x_TE = x_TE.clone()
    return DecodeStep(x_TE, tokens_T.contiguous(), router, experts, shared, float(limit), tuning)


def _in_halves(step: DecodeStep) -> Decoded:
    half = step.x_TE.shape[0] // 2
    halves = [(step.x_TE[part], step.tokens_T[part]) for part in (slice(half), slice(half, None))]
    parts = [moe_decode(*step._replace(x_TE=x_TE, tokens_T=tokens_T)) for x_TE, tokens_T in halves]
    return Decoded(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class _Decode(NamedTuple):
    """A decode step on weights: the launch, and where in its scratch memory ids, weights, hidden values and partial
    sums begin and it ends. One allocation, because each takes the host microseconds.
    """

    launch: Launch
    routes: tuple[int, int]
    offsets: tuple[int, ...]

    def __call__(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        """The result and the scratch memory."""
        x_TE, read = step.x_TE, (step.x_TE, step.tokens_T) if step.router.hashed else (step.x_TE,)
        y_TE, scratch = torch.empty_like(x_TE), torch.empty(self.offsets[-1], dtype=torch.uint8, device=x_TE.device)
        ids, weights, hidden, partial, _ = [scratch.data_ptr() + offset for offset in self.offsets]
        self.launch(*read, hidden, y_TE, ids, weights, partial)
        return y_TE, scratch

    def with_routes(self, y_TE: Tensor, scratch: Tensor) -> Decoded:
        """The result with the routes, which are views of the scratch memory."""
        ids, weights, *_ = (scratch[offset:] for offset in self.offsets)
        strides = (self.routes[1], 1)
        ids_TP = ids.view(torch.int64).as_strided(self.routes, strides)
        return Decoded(y_TE, ids_TP, weights.view(torch.float32).as_strided(self.routes, strides))


def _prepared(step: DecodeStep) -> _Decode | None:
    """The launch for such a step; None where its tokens have to be shared out over several."""
    varying = (step.x_TE, step.tokens_T) if step.router.hashed else (step.x_TE,)
    key = (step.limit, step.tuning, layouts(*varying))
    return remembered(step.experts, (step.router, step.shared), key, _prepare, step)


def _prepare(step: DecodeStep) -> _Decode | None:
    check_router(step.x_TE, step.tokens_T, step.router)
    _check_experts(step.x_TE, step.router, step.experts, step.shared)
    tokens, per_token, _, width, inner = step.sizes
    if step.stages == 0:
        # Activations in both 16-bit types do not fit beside the ring.
        if tokens == 1:
            raise ValueError(f"x_TE: found width {width}, more than a multiprocessor's shared memory holds")
        return None
    router, tuning, device = step.router, step.tuning, step.x_TE.device
    pairs, blocks = padded(width) // 32, multiprocessors(device)
    groups = ((group.w1, group.w3, group.w2) for group in (step.experts, step.shared))
    vocabulary = router.selection.shape[0] if router.hashed else 0
    launch = prepare(
        *("moe_decode", "moe_decode", blocks, tuning.warps * 32, Tensor, router.gate.data),
        *selection_arguments(router, Tensor),
        *(part for group in groups for weight in group for part in _parts(weight)),
        *[Tensor] * 5,
        zeroed_counters(device, "moe_decode", COUNTERS),
        zeroed_counters(device, "moe_decode pairs", pairs),
        *(*step.sizes, vocabulary, step.limit, float(router.scaling)),
        device=device,
        shared_bytes=_shared_bytes(tokens, width, step.formats, tuning, step.stages),
        defines=step.defines,
    )
    hidden, partial = tokens * (per_token + 1) * padded(inner), (pairs + blocks) * tokens * 32
    sizes = (8 * tokens * per_token, 4 * tokens * per_token, 2 * hidden, 4 * partial)
    offsets = tuple(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    return _Decode(launch, (tokens, per_token), offsets)


def _formats(
    experts: ExpertWeights[PackedWeight], shared: ExpertWeights[PackedWeight]
) -> tuple[QuantFormat, QuantFormat]:
    return experts.w1.format, shared.w1.format


def _parts(weight: PackedWeight | QuantTensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return weight.data, weight.block_scale, weight.global_scale


def _padded_tokens(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _stage_columns(format: QuantFormat) -> int:
    return _STAGE_LOADS * chunk_columns(format)


def _pair_bytes(formats: tuple[QuantFormat, QuantFormat]) -> int:
    """Bytes of one ring slot: a stage of two row tiles with its block scales (Stage<F>::BYTES of weight_tile.cuh)."""
    scale = {QuantFormat.NVFP4: 256, QuantFormat.MXFP4: 128, QuantFormat.FP8_BLOCK128: 16, QuantFormat.BF16: 0}
    return 2 * (_STAGE_LOADS * _LOAD_BYTES + max(scale[format] for format in formats))


def _partial_bytes(tokens: int, tuning: Tuning) -> int:
    buffers = 2 if tokens > 4 else 4
    return buffers * tuning.warps * 2 * _padded_tokens(tokens) * 16 * 4


def _shared_bytes(
    tokens: int, width: int, formats: tuple[QuantFormat, QuantFormat], tuning: Tuning, stages: int
) -> int:
    """Ring of weights, sums of the warps, and x or (phase 2) the ring of hidden rows. At least half of what a
    multiprocessor has, so that two blocks never share one.
    """
    columns = max(map(_stage_columns, formats))
    copies = len({format is QuantFormat.BF16 for format in formats})
    activations = copies * tokens * 2 * -(-width // columns) * columns
    hidden = tuning.warps * stages * _padded_tokens(tokens) * 2 * columns
    nbytes = tuning.warps * stages * _pair_bytes(formats) + _partial_bytes(tokens, tuning) + max(activations, hidden)
    return max(nbytes, _SHARED_LEAST)


def _ring_depth(tokens: int, width: int, formats: tuple[QuantFormat, QuantFormat], tuning: Tuning) -> int:
    """Ring depth that leaves room for the activations; 0 when they do not fit at all."""
    depths = range(tuning.stages, 0, -1)
    fits = (depth for depth in depths if _shared_bytes(tokens, width, formats, tuning, depth) <= _SHARED_LIMIT)
    return next(fits, 0)


def _check_experts(
    x_TE: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
) -> None:
    width, (count, inner) = x_TE.shape[1], experts.w1.shape[:2]
    if count != router.gate.shape[0]:
        raise ValueError(f"experts: found {count}, expected {router.gate.shape[0]}, the rows of the gate")
    for name, group, stack in (("experts", experts, (count,)), ("shared", shared, ())):
        for part, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
            weight = getattr(group, part)
            if not isinstance(weight, PackedWeight) or weight.format != group.w1.format:
                expected = group.w1.format.value
                raise ValueError(f"{name}.{part}: found {weight.format.value}, expected a packed {expected}")
            if tuple(weight.shape) != (*stack, rows, columns):
                expected = [*stack, rows, columns]
                raise ValueError(f"{name}.{part}: found {list(weight.shape)}, expected {expected}")
            if weight.device != x_TE.device:
                raise ValueError(f"{name}.{part}: found {weight.device}, expected {x_TE.device}")
