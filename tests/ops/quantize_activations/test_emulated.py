"""Quantised activations in the torch ops: which products have them, and with what values."""

import pytest
import torch
from torch import Tensor

from dsv4.engine_config import ACTIVATION_MODES, ActivationMode
from dsv4.ops import TORCH, torch_packing
from dsv4.ops.moe import ExpertWeights, expert_sum
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize_activations import (
    ActivationFormat,
    activations_of,
    hidden_global_scale,
    quantize_fp8,
    quantize_nvfp4,
    quantize_rows,
)
from dsv4.ops.quantize_activations.emulated import EmulatedWeight, dequantized_weight, multiplied
from dsv4.ops.router import Router
from dsv4.weights.codes import exponent_to_e8m0
from dsv4.weights.quant import QuantFormat, QuantTensor, Weight
from dsv4.weights.quantize import quantize
from tests.ops.cases import normal

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
LIMIT = 2.0
SCALING = 1.5
QUANTISED: tuple[ActivationMode, ...] = ("fp8", "nvfp4")


def stored(format: QuantFormat, *shape: int, seed: int = 0) -> QuantTensor:
    return quantize(normal(*shape, seed=seed) * shape[-1] ** -0.5, format)


def disguised(rows: int, columns: int) -> QuantTensor:
    """MXFP4 as a lossless cast leaves it in NVFP4."""
    codes = stored(MXFP4, rows, columns).data
    scale = torch.exp2(torch.arange(rows * columns // 32).view(rows, -1) % 5 - 2.0)
    scale = scale.repeat_interleave(2, -1).to(torch.float8_e4m3fn)
    return QuantTensor(codes, scale, torch.tensor(0.01), NVFP4, (rows, columns))


def rounded(x: Tensor, format: ActivationFormat | None) -> Tensor:
    return x.float() if format is None else quantize_rows(x, format).dequantize()


def uneven(rows: int, *columns: int, seed: int = 0) -> Tensor:
    """Rows of different sizes, as bfloat16."""
    sizes = torch.exp2(torch.arange(rows) % 7 - 3.0).view(-1, *(1 for _ in columns))
    return (normal(rows, *columns, seed=seed) * sizes).bfloat16()


def test_scales_decide_too() -> None:
    scaled = QuantTensor(stored(FP8, 128, 256).data, torch.full((1, 2), 0.3), None, FP8, (128, 256))
    assert activations_of("fp8", scaled) is None
    assert activations_of("fp8", stored(FP8, 128, 256)) is ActivationFormat.FP8
    assert activations_of("fp8", stored(NVFP4, 32, 256)) is None
    assert activations_of("fp8", disguised(32, 256)) is ActivationFormat.FP8
    for weight in (disguised(32, 256), stored(NVFP4, 32, 256)):
        assert activations_of("nvfp4", weight) is ActivationFormat.NVFP4
        assert activations_of("bf16", weight) is None


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
@pytest.mark.parametrize("format", list(QuantFormat))
def test_values_of_a_weight_stay_what_they_are(mode: ActivationMode, format: QuantFormat) -> None:
    weight = stored(format, 3, 32, 128)
    found = dequantized_weight(weight, mode)
    assert isinstance(found, EmulatedWeight) == (activations_of(mode, weight) is not None)
    assert found.shape == weight.shape
    assert found.nbytes == 4 * 3 * 32 * 128
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert type(found[1]) is type(found)
    assert torch.equal(found[1].dequantize(), weight[1].dequantize())


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
@pytest.mark.parametrize("format", [NVFP4, MXFP4, FP8, BF16])
def test_linear_rounds_in_steps_of_many_tokens(mode: ActivationMode, format: QuantFormat) -> None:
    weight = stored(format, 32, 256)
    packed = torch_packing(mode).pack_weight(weight)
    x = uneven(9, 256)
    wanted = rounded(x, activations_of(mode, weight)) @ weight.dequantize().T
    assert torch.equal(TORCH.linear(x, packed, torch.float32), wanted)
    few = x[:8].float() @ weight.dequantize().T
    assert torch.equal(TORCH.linear(x[:8], packed, torch.float32), few)


@pytest.mark.parametrize("mode", QUANTISED)
def test_rows_of_a_list_take_what_each_matrix_does(mode: ActivationMode) -> None:
    weights = [stored(FP8, 32, 256), stored(NVFP4, 32, 256), stored(BF16, 32, 256)]
    rows = torch_packing(mode).pack_rows(weights, [torch.float32] * 3)
    x = uneven(20, 256)
    norm = normal(256, seed=9)
    normed = rms_norm(x, norm, 1e-6)
    for found, weight in zip(TORCH.linear_rows(x, rows, norm, 1e-6), weights, strict=True):
        wanted = rounded(normed, activations_of(mode, weight)) @ weight.dequantize().T
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("mode", "format"), [("fp8", FP8), ("nvfp4", NVFP4)])
@pytest.mark.parametrize("columns", [128, 96])
def test_the_groups_of_a_token_are_one_row(
    mode: ActivationMode, format: QuantFormat, columns: int
) -> None:
    weight = stored(format, 3 * 16, columns)
    x_TGK = uneven(10, 3, columns)
    x_TGK[:, 1] *= 16
    found = multiplied(x_TGK, dequantized_weight(weight, mode), 10)
    padded = torch.nn.functional.pad(x_TGK, (0, -columns % 128 if mode == "fp8" else -columns % 64))
    taken = activations_of(mode, weight)
    wanted = rounded(padded.flatten(1), taken).view(padded.shape)[..., :columns]
    assert torch.equal(found, wanted)
    y_TGR = TORCH.grouped_linear(x_TGK, dequantized_weight(weight, mode))
    for group in range(3):
        one = wanted[:, group] @ weight.dequantize()[16 * group : 16 * group + 16].T
        torch.testing.assert_close(y_TGR[:, group].float(), one, rtol=2**-8, atol=1e-5)


def experts(format: QuantFormat, count: int | None) -> ExpertWeights[QuantTensor]:
    lead = () if count is None else (count,)
    shapes = ((128, 256), (256, 128), (128, 256))
    return ExpertWeights(*(stored(format, *lead, *shape, seed=i) for i, shape in enumerate(shapes)))


def packed(weights: ExpertWeights[QuantTensor], mode: ActivationMode) -> ExpertWeights[Weight]:
    pack = torch_packing(mode).pack_weight
    return ExpertWeights(pack(weights.w1), pack(weights.w2), pack(weights.w3))


def one_expert(
    x: Tensor, weights: ExpertWeights[QuantTensor], mode: ActivationMode, weight: float, most: float
) -> Tensor:
    """The expert's row of one token, written down again."""
    taken = activations_of(mode, weights.w1)
    read = rounded(x, taken)
    gate = (read @ weights.w1.dequantize().T).clamp(max=LIMIT)
    up = (read @ weights.w3.dequantize().T).clamp(-LIMIT, LIMIT)
    hidden = (torch.nn.functional.silu(gate) * up * weight).bfloat16()
    if taken is ActivationFormat.NVFP4:
        hidden = quantize_nvfp4(hidden, hidden_global_scale(LIMIT, most)).dequantize()
    elif taken is ActivationFormat.FP8:
        hidden = quantize_fp8(hidden).dequantize()
    return hidden.float() @ weights.w2.dequantize().T


@pytest.mark.parametrize("mode", QUANTISED)
@pytest.mark.parametrize("formats", [(NVFP4, FP8), (MXFP4, FP8), (FP8, NVFP4), (BF16, BF16)])
def test_experts_round_their_input_and_hidden_rows(
    mode: ActivationMode, formats: tuple[QuantFormat, QuantFormat]
) -> None:
    routed, shared = experts(formats[0], 4), experts(formats[1], None)
    x = uneven(12, 256)
    gate = QuantTensor.dense(normal(4, 256, seed=5))
    router = Router(gate, torch.zeros(4), False, 2, SCALING)
    found = TORCH.moe(
        x,
        torch.zeros(12, dtype=torch.int64),
        router,
        packed(routed, mode),
        packed(shared, mode),
        LIMIT,
    )
    for token in range(12):
        row = x[token : token + 1]
        total = one_expert(row, shared, mode, 1.0, 1.0)
        for expert, weight in sorted(
            zip(found.ids_TP[token].tolist(), found.weights_TP[token].tolist(), strict=True)
        ):
            one = ExpertWeights(routed.w1[expert], routed.w2[expert], routed.w3[expert])
            total += one_expert(row, one, mode, weight, SCALING)
        torch.testing.assert_close(found.y_TE[token].float(), total[0], rtol=2**-7, atol=2e-4)


@pytest.mark.parametrize("mode", QUANTISED)
def test_a_token_does_not_depend_on_its_chunk(mode: ActivationMode) -> None:
    """Products of float32 in other sizes may differ in the last bits, and so round a hidden value
    the other way. A scale of the chunk would lose all but the one large row.
    """
    x = uneven(60, 256)
    x[31] *= 1000
    chunks = (slice(0, 9), slice(9, 20), slice(20, 60))
    linears = [stored(FP8, 32, 256), stored(NVFP4, 32, 256)]
    for weight in linears:
        packed_weight = torch_packing(mode).pack_weight(weight)
        whole = TORCH.linear(x, packed_weight, torch.float32)
        parts = [TORCH.linear(x[part], packed_weight, torch.float32) for part in chunks]
        assert_same_rows(torch.cat(parts), whole, 1e-5)
    routed, shared = packed(experts(NVFP4, 4), mode), packed(experts(FP8, None), mode)
    ids = normal(60, 4, seed=3).topk(2, dim=1).indices
    weights = torch.full((60, 2), 0.75)
    whole = expert_sum(x, ids, weights, routed, shared, LIMIT, SCALING)
    parts = [
        expert_sum(x[part], ids[part], weights[part], routed, shared, LIMIT, SCALING)
        for part in chunks
    ]
    assert_same_rows(torch.cat(parts), whole, 0.03)


def assert_same_rows(found: Tensor, wanted: Tensor, of_peak: float) -> None:
    """No row differs by more than ``of_peak`` of its largest value."""
    error = (found.float() - wanted.float()).abs().amax(1)
    assert bool((error <= of_peak * wanted.float().abs().amax(1)).all())


def test_a_scale_of_e8m0_is_what_fp8_weights_have() -> None:
    """What quantised activations multiply keeps its own scale."""
    scale = exponent_to_e8m0(torch.tensor([[-3, 5]]))
    weight = QuantTensor(stored(FP8, 128, 256).data, scale, None, FP8, (128, 256))
    found = dequantized_weight(weight, "fp8")
    assert isinstance(found, EmulatedWeight)
    assert torch.equal(found.dequantize(), weight.dequantize())
