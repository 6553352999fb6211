"""Recorded layers with quantised activations, executed on the CPU: products by the compiled kernels
in the machine, what lies between them by torch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.engine_config import ActivationMode
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import torch_packing
from dsv4.ops.linear import grouped_linear, prefill_w16
from dsv4.ops.linear import prefill_scaled as linear_scaled
from dsv4.ops.linear.cutedsl.scaled_config import ScaledConfig
from dsv4.ops.linear.prefill_cutedsl import INSTALLED
from dsv4.ops.moe import ExpertWeights, moe
from dsv4.ops.moe import prefill_scaled as moe_scaled
from dsv4.ops.native_packing import native_packing
from dsv4.ops.quantize_activations import ActivationFormat, quantize_rows
from dsv4.ops.router import Router, route
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from dsv4.weights.scale_swizzle import swizzle_block_scale
from tests.ptx.run import run_kernel
from tests.ptx.schedule import random_schedule
from tests.ptx.test_blackwell_scaled import compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="needs nvidia-cutlass-dsl"),
]
FP8, MXFP4, NVFP4 = QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4
TOKENS, WIDTH, INNER, EXPERTS, PER_TOKEN = 20, 256, 128, 4, 2
LIMIT = 4.0
TILE = 128
ON_CPU = Target(torch.device("cpu"), "sm_100a", 148)


class Memory:
    """Random bytes for the buffers of a recording; tensors with values stay what they are."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def of(self, recorded: Any) -> Any:
        """The memory of a recorded tensor; anything else is itself."""
        if not isinstance(recorded, Tensor) or not recorded.is_meta:
            return recorded
        nbytes = recorded.untyped_storage().nbytes()
        fresh = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))
        buffer = self._buffers.setdefault(storage_key(recorded), fresh)
        return buffer.view(recorded.dtype).as_strided(
            recorded.size(), recorded.stride(), recorded.storage_offset()
        )


def run(recording: Recording, kernels: dict[str, Callable[..., None]]) -> Memory:
    """Runs the items in their order; ``kernels``: what torch does in place of each launch."""
    memory = Memory()
    for item in recording.items:
        if isinstance(item, Launch):
            arguments = {name: memory.of(value) for name, value in item.arguments.items()}
            kernels[item.signature.kernel](**arguments)
        else:
            item.function(recording.tokens, *map(memory.of, item.tensors))
    return memory


def in_the_machine(config: ScaledConfig, architecture: str) -> Callable[..., object]:
    """The compiled kernel, called as the launchers call it."""
    assert architecture == "sm_100a"
    # One cluster works on all tiles.
    schedule = random_schedule(1)
    return lambda *arguments: run_kernel(compiled(config), arguments, schedule, config.ctas)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_w16, "INSTALLED", False)
    monkeypatch.setattr(linear_scaled, "load_gemm", in_the_machine)


def quantized(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    norm_weight: Tensor | None = None,
    **_: object,
) -> None:
    """``quantize_rows``: rows of x, and zeros up to the next atom."""
    assert norm_weight is None
    format = ActivationFormat.FP8 if global_scale is None else ActivationFormat.NVFP4
    rows = quantize_rows(x, format)
    padding = (0, 0, 0, codes.shape[0] - x.shape[0])
    codes.copy_(torch.nn.functional.pad(rows.codes, padding))
    plain = torch.nn.functional.pad(rows.scales, padding)
    scales.view(torch.uint8).copy_(swizzle_block_scale(plain))
    if global_scale is not None and rows.global_scale is not None:
        global_scale[: x.shape[0]] = rows.global_scale


def quantized_sorted(
    x: Tensor, slots: Tensor, tiles: Tensor, tile_count: Tensor, per_token: int, **rest: Any
) -> None:
    """``quantize_sorted_rows``: row 128 · i + j is that of pair j of tile i."""
    rows = torch.zeros(rest["codes"].shape[0], x.shape[1], dtype=x.dtype)
    for index, (_, first, count, _) in enumerate(tiles[: int(tile_count)].tolist()):
        pairs = slots[first : first + count].long()
        rows[TILE * index : TILE * index + count] = x[pairs // per_token]
    quantized(rows, rest["codes"], rest["scales"], rest["global_scale"])


def sorted_by_expert(
    ids: Tensor, slots: Tensor, tiles: Tensor, tile_count: Tensor, **_: object
) -> None:
    """``moe_sort`` for fewer pairs of an expert than a tile holds."""
    order = ids.flatten().argsort(stable=True)
    slots.copy_(order)
    experts, counts = ids.flatten().unique(return_counts=True)
    first = 0
    for index, (expert, count) in enumerate(zip(experts, counts, strict=True)):
        tiles[index] = torch.tensor([expert, first, count, 0])
        first += int(count)
    tile_count.fill_(len(experts))


def combined(shared: Tensor, routed: Tensor, ids: Tensor, y: Tensor, **_: object) -> None:
    """``moe_combine``."""
    total = shared.clone()
    of_token = routed.view(*ids.shape, -1)
    for token, order in enumerate(ids.argsort(1)):
        for slot in order.tolist():
            total[token] += of_token[token, slot]
    y.copy_(total)


def close(found: Tensor, emulated: Tensor, exact: Tensor) -> None:
    """As the torch ops emulate it, which is not what 16-bit activations give."""
    largest = float(exact.abs().max())
    error = float((found.float() - emulated.float()).abs().max()) / largest
    rounding = float((emulated.float() - exact.float()).abs().max()) / largest
    assert error < 4e-3 < 2 * rounding, (error, rounding)


def experts_of(given: list[QuantTensor], pack: Callable[[QuantTensor], Any]) -> ExpertWeights[Any]:
    w1, w2, w3 = map(pack, given)
    return ExpertWeights(w1, w2, w3)


@pytest.mark.parametrize(
    ("mode", "routed", "shared"), [("nvfp4", NVFP4, FP8), ("fp8", MXFP4, MXFP4)]
)
def test_a_layer_of_experts_is_what_the_torch_ops_emulate(
    mode: ActivationMode, routed: QuantFormat, shared: QuantFormat
) -> None:
    random = torch.Generator().manual_seed(1)
    up, down = (INNER, WIDTH), (WIDTH, INNER)
    x_TE = torch.randn(TOKENS, WIDTH, generator=random).bfloat16()

    def weights(format: QuantFormat, *stack: int) -> list[QuantTensor]:
        shapes = ((*stack, *up), (*stack, *down), (*stack, *up))
        return [quantize(torch.randn(shape, generator=random) / 12, format) for shape in shapes]

    given = weights(routed, EXPERTS), weights(shared)
    gate = QuantTensor.dense(torch.randn(EXPERTS, WIDTH, generator=random).bfloat16())
    router = Router(gate, torch.zeros(EXPERTS), False, PER_TOKEN, 1.5)
    tokens_T = torch.zeros(TOKENS, dtype=torch.int64)
    torch_pack, plain_pack = (torch_packing(name).pack_weight for name in (mode, "bf16"))
    emulated, exact = (
        moe(
            x_TE,
            tokens_T,
            router,
            experts_of(given[0], pack),
            experts_of(given[1], pack),
            LIMIT,
        )
        for pack in (torch_pack, plain_pack)
    )

    packing = native_packing(mode)
    assert packing.pack_experts is not None
    recording = Recording(ON_CPU, TOKENS)
    packed_router = Router(pack_weight(gate), router.selection, False, PER_TOKEN, router.scaling)
    experts, alone = (packing.pack_experts(*part) for part in given)

    def chosen(ids_TP: Tensor, weights_TP: Tensor, **_: object) -> None:
        ids, weights = route(x_TE, tokens_T, router)
        ids_TP.copy_(ids)
        weights_TP.copy_(weights)

    y_TE, *_ = moe_scaled.moe(recording, x_TE, tokens_T, packed_router, experts, alone, LIMIT)
    memory = run(
        recording,
        {
            "prefill_linear": lambda **_: None,
            "router_select": chosen,
            "moe_sort": sorted_by_expert,
            "quantize_sorted_rows": quantized_sorted,
            "quantize_rows": quantized,
            "moe_combine": combined,
        },
    )
    close(memory.of(y_TE), emulated.y_TE, exact.y_TE)


def test_groups_are_what_the_torch_ops_emulate() -> None:
    random = torch.Generator().manual_seed(2)
    x_TGK = torch.randn(TOKENS, 2, 128, generator=random).bfloat16()
    weight = quantize(torch.randn(256, 128, generator=random), FP8)
    emulated, exact = (
        grouped_linear(x_TGK, torch_packing(mode).pack_weight(weight)) for mode in ("fp8", "bf16")
    )
    recording = Recording(ON_CPU, TOKENS)
    packed = native_packing("fp8").pack_weight(weight)
    y_TGR = linear_scaled.grouped_linear(recording, x_TGK, packed)
    memory = run(recording, {"quantize_rows": quantized})
    close(memory.of(y_TGR), emulated, exact)
