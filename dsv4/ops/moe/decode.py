"""Mixture of experts of a decode step on the GPU: one launch routes and computes 1 to 8 tokens."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.constants import FORMAT_CODE, MAX_EXPERTS
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.exchange.words import NOT_SENT, Words, WordSum, outgoing
from dsv4.ops.linear.decode_plan import slot_bytes
from dsv4.ops.moe import ExpertWeights, Mixture
from dsv4.ops.moe.operands import Layer, check_experts, expert_arguments
from dsv4.ops.router import Router
from dsv4.ops.router.selection import (
    WARP,
    check_router,
    selection_arguments,
    selection_defines,
)
from dsv4.weights.packed import PackedWeight, chunk_columns, padded
from dsv4.weights.quant import QuantFormat

# Two of the number of the launch and two per word of the score exchange. All shapes share them, so
# that the number of a launch, which marks its words, is its own.
COUNTERS = 2 + 2 * MAX_DECODE_TOKENS * MAX_EXPERTS
_STAGE_LOADS = 4
# Rows of the output that a work item of the second phase computes, and their partial sums.
_PAIR_ROWS = 32
# Dynamic shared memory a block may use: 227 KB less the kernel's static tables.
_SHARED_LIMIT = (227 << 10) - (8 << 10)
# Half of what a multiprocessor has, so that two blocks never share one: with less, two blocks of a
# launch land on whichever multiprocessor drains first, and all wait for it (docs/kernels/moe.md).
_SHARED_LEAST = 114 << 10


class Ring(NamedTuple):
    """Warps per block, and the stages of weights that each of them has in flight."""

    warps: int
    stages: int


# Where the activations leave room for it. 8 warps are 3 to 10 % slower (latency of the decode
# chains), more than 12 or a deeper ring slower as well (docs/kernels/moe.md). The number of warps
# decides the order of sums, so it is the same for all numbers of tokens.
RING = Ring(12, 2)
# Loads of a stage that are decoded side by side. All four take more than 128 registers on
# Blackwell.
LOADS_AT_ONCE = {"sm_90a": 4, "sm_100a": 2, "sm_103a": 2}
# Tokens whose activations a thread holds at once, by how many vectors of eight it has of each, from
# 1 on; of more vectors one token. More of them take more registers than there are.
_TOKENS_HELD = {"sm_90a": (8, 8, 4, 3, 2, 2), "sm_100a": (8, 4, 2, 2), "sm_103a": (8, 4, 2, 2)}


def moe(
    recording: Recording,
    x_TE: Tensor,
    tokens_T: Tensor,
    router: Router[PackedWeight],
    experts: ExpertWeights[PackedWeight],
    shared: ExpertWeights[PackedWeight],
    limit: float,
) -> Mixture:
    """``dsv4.ops.moe.moe`` for bfloat16 x of 1 to 8 tokens: bfloat16 ``[T, E]``.

    float32 sums in a fixed order, one final rounding. Routes as ``dsv4.ops.router.prefill.route``;
    packed expert weights. An id outside [0, X) adds nothing. All blocks of the launch have to be
    resident at once: on one device, such launches must not run at the same time on several streams.
    Hidden values below 2^-31 of limit² · max(1, Σ weights) of a token lose bits. With peers the
    result is the sum over the ranks, on its way. Raises ``ValueError`` for anything else than the
    above, and for x that is not contiguous or, where its rows are whole vectors of 16 bytes, not
    aligned to them.
    """
    layer = Layer(experts, shared, float(limit))
    _check(x_TE, tokens_T, router, layer)
    step = _Step(x_TE, tokens_T, router, layer, RING)
    shape = (x_TE.shape[0], router.experts_per_token)
    ids_TP = recording.empty(shape, torch.int64)
    weights_TP = recording.empty(shape, torch.float32)
    if recording.peers is None:
        results = Mixture(recording.empty_like(x_TE), ids_TP, weights_TP)
        _record(recording, step, _Results(*results, NOT_SENT))
        return results
    words = WordSum(recording.next_exchange(), *x_TE.shape)
    _record(recording, step, _Results(None, ids_TP, weights_TP, outgoing(recording, words)))
    return Mixture(words, ids_TP, weights_TP)


@dataclass(frozen=True)
class _Step:
    """Arguments of one launch, and how much of the GPU it takes. ``most``: the ring, if it fits."""

    x_TE: Tensor
    tokens_T: Tensor
    router: Router[PackedWeight]
    layer: Layer
    most: Ring

    @property
    def tokens(self) -> int:
        return self.x_TE.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """X, F, E."""
        count, inner, width = self.layer.experts.w1.shape
        return count, inner, width

    @property
    def formats(self) -> tuple[QuantFormat, QuantFormat]:
        """The formats of the routed and the shared experts."""
        return self.layer.experts.w1.format, self.layer.shared.w1.format

    @property
    def stage_columns(self) -> int:
        """The larger of both formats' stages."""
        return _STAGE_LOADS * max(map(chunk_columns, self.formats))

    @property
    def ring(self) -> Ring | None:
        """As many stages as leave room for the activations; None where these do not fit at all."""
        for stages in range(self.most.stages, 0, -1):
            ring = Ring(self.most.warps, stages)
            if self.shared_bytes(ring) <= _SHARED_LIMIT:
                return ring
        return None

    def shared_bytes(self, ring: Ring) -> int:
        """Ring of weights; behind it sums of the warps and x, or in phase 2 more sums and a stage
        of h for every warp.
        """
        _, _, width = self.sizes
        weights = ring.warps * ring.stages * 2 * slot_bytes(self.formats)
        # Of two tiles of 16 rows. Phase 1: those of BUFFERS items. Phase 2: of BATCHES · ROUNDS.
        sums = ring.warps * 2 * self.tokens * 16 * 4
        buffers, rounds = (2, 4) if self.tokens > 4 else (4, 8)
        # x is there in each of the 16-bit types that a format multiplies in.
        copies = len({format is QuantFormat.BF16 for format in self.formats})
        activations = copies * self.tokens * 2 * round_up(width, self.stage_columns)
        hidden = ring.warps * self.tokens * 2 * self.stage_columns
        behind = max(buffers * sums + activations, rounds * sums + hidden)
        return max(weights + behind, _SHARED_LEAST)

    def defines(self, ring: Ring, target: Target) -> Defines:
        """What moe_decode.cu is compiled with."""
        count, inner, width = self.sizes
        row_pairs = ceil_div(count, 16) * 8
        vectors = ceil_div(round_up(width, self.stage_columns) // 8, WARP * ring.warps)
        routed, shared = self.formats
        return (
            ("WIDTH", width),
            ("INNER", inner),
            ("BLOCKS", target.multiprocessors),
            *selection_defines(self.router),
            ("GATE_ROUNDS", ceil_div(row_pairs, target.multiprocessors)),
            ("VECTORS", vectors),
            ("TOKENS_AT_ONCE", _tokens_at_once(self.tokens, vectors, target.architecture)),
            ("ROUTED", FORMAT_CODE[routed]),
            ("SHARED", FORMAT_CODE[shared]),
            ("TOKENS", self.tokens),
            ("TAILS", int(width % self.stage_columns != 0 or inner % self.stage_columns != 0)),
            ("WARPS", ring.warps),
            ("STAGES", ring.stages),
            ("LOADS_AT_ONCE", LOADS_AT_ONCE[target.architecture]),
        )

    def part(self, tokens: slice) -> "_Step":
        """The same, its ring as well, for some of the tokens."""
        return replace(self, x_TE=self.x_TE[tokens], tokens_T=self.tokens_T[tokens])


class _Results(NamedTuple):
    """Where the results of a launch go: y ``[T, E]``, or ``words`` with the sums that it is
    rounded from.
    """

    y_TE: Tensor | None
    ids_TP: Tensor
    weights_TP: Tensor
    words: Words

    def part(self, tokens: slice, width: int) -> "_Results":
        """Those of some of the tokens, of y ``[T, width]``."""
        return _Results(
            None if self.y_TE is None else self.y_TE[tokens],
            self.ids_TP[tokens],
            self.weights_TP[tokens],
            self.words.behind((tokens.start or 0) * width),
        )


def _check(x_TE: Tensor, tokens_T: Tensor, router: Router[PackedWeight], layer: Layer) -> None:
    check_router(x_TE, tokens_T, router)
    check_experts(x_TE, router, layer)
    tokens, width = x_TE.shape
    if not 1 <= tokens <= MAX_DECODE_TOKENS:
        raise ValueError(f"x_TE: found {tokens} tokens, expected 1 to {MAX_DECODE_TOKENS}")
    expect("x_TE", x_TE, torch.bfloat16, (tokens, width))
    if width % 8 == 0 and not is_aligned(x_TE, 16):
        raise ValueError("x_TE: found a start between 16-byte borders, expected one on a border")


def _tokens_at_once(tokens: int, vectors: int, architecture: str) -> int:
    """Of ``tokens`` as many at a time, as few times as they can be held."""
    held = dict(enumerate(_TOKENS_HELD[architecture], start=1)).get(vectors, 1)
    return ceil_div(tokens, ceil_div(tokens, held))


def _record(recording: Recording, step: _Step, results: _Results) -> None:
    """One launch, or one for each half of the tokens where their activations do not fit."""
    ring = step.ring
    if ring is not None:
        _launch(recording, step, ring, results)
        return
    if step.tokens == 1:
        found = f"width {step.sizes[-1]}"
        raise ValueError(f"x_TE: found {found}, more than a multiprocessor's shared memory holds")
    half = step.tokens // 2
    for part in (slice(half), slice(half, None)):
        _record(recording, step.part(part), results.part(part, step.sizes[-1]))


def _launch(recording: Recording, step: _Step, ring: Ring, results: _Results) -> None:
    _, inner, width = step.sizes
    blocks = recording.target.multiprocessors
    # Of all launches of the recording, which take its halves in turn: enough for the most tokens.
    hidden_rows = recording.tokens * (step.router.experts_per_token + 1)
    half_bytes = hidden_rows * padded(inner) * 2
    defines = (*step.defines(ring, recording.target), *results.words.defines)
    kernel = Kernel("moe/moe_decode", "moe_decode", defines)
    recording.launch(
        Shape(kernel, blocks, ring.warps * WARP, step.shared_bytes(ring), settles=True),
        x_TE=step.x_TE,
        gate=step.router.gate.data,
        **expert_arguments(step.layer),
        **selection_arguments(step.router, step.tokens_T),
        # 16-bit values of either type, by the format of their expert, two to a word.
        h=recording.zeroed("moe_decode h", 2 * half_bytes // 4),
        y_TE=results.y_TE,
        ids_TP=results.ids_TP,
        weights_TP=results.weights_TP,
        nan=recording.nan_1,
        counters=recording.zeroed("moe_decode", COUNTERS),
        # Words of 64 bits.
        sums=recording.zeroed("moe_decode sums", 2 * blocks * MAX_DECODE_TOKENS * _PAIR_ROWS),
        half_bytes=half_bytes,
        **results.words.arguments,
        T=step.tokens,
        limit=step.layer.limit,
    )
