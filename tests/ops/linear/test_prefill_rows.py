"""Products of a list in prompts on the GPU: published lists and lists of several formats against
float64, and shorter steps of a recording.
"""

import pytest
import torch
from torch import Tensor

from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear import prefill_rows
from dsv4.ops.linear.row_list import PackedRows, pack_rows
from dsv4.ops.norm.cuda import rms_norm
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.instruction_sets import INSTRUCTION_SETS, use_instructions
from tests.ops.linear.test_prefill_linear import assert_product, normal

pytestmark = pytest.mark.gpu

NVFP4 = QuantFormat.NVFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
# K and the matrices: the input rows of a CSA layer of Flash and of an HCA layer (of half of K), the
# query rows of a rank of 4, and three formats.
LISTS = {
    "csa": (2048, [(rows, FP8) for rows in (1024, 512, 1024, 1024, 256, 256, 64)]),
    "hca": (2048, [(rows, NVFP4) for rows in (1024, 512, 512, 512)]),
    "queries": (1024, [(8192, FP8), (8192, FP8)]),
    "formats": (512, [(320, BF16), (64, NVFP4), (192, FP8), (448, NVFP4), (64, BF16)]),
}

linear_rows = immediately(prefill_rows.linear_rows)


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_instructions(request.param, monkeypatch, prefill_rows)
    if request.param == "mma":
        monkeypatch.setattr(prefill_rows, "takes_boxes", lambda *_: False)


def packed(name: str) -> tuple[list[QuantTensor], PackedRows]:
    columns, matrices = LISTS[name]
    weights = [
        quantize(normal(rows, columns, seed=seed, scale=0.1 * seed), format)
        for seed, (rows, format) in enumerate(matrices, start=1)
    ]
    dtypes = [torch.float32 if seed % 2 else None for seed in range(len(weights))]
    return weights, pack_rows(weights, dtypes)


def activations(name: str, tokens: int) -> Tensor:
    return normal(tokens, LISTS[name][0], seed=20, dtype=torch.bfloat16)


@pytest.mark.parametrize("tokens", [9, 128, 129, 300, 1000])
@pytest.mark.parametrize("name", LISTS)
def test_products(name: str, tokens: int) -> None:
    weights, rows = packed(name)
    x = activations(name, tokens)
    poison(1 << 20)
    for weight, product in zip(weights, linear_rows(x, rows), strict=True):
        assert_product(product, x.double() @ weight.dequantize().double().T)


@pytest.mark.parametrize("name", LISTS)
def test_a_recording_serves_shorter_chunks(name: str) -> None:
    _, rows = packed(name)
    x = activations(name, 700)
    prepared = PreparedOp(prefill_rows.linear_rows, x, rows)
    for tokens in (700, 9, 129, 16, 512, 700):
        for product in prepared.result:
            product.fill_(torch.nan)
        expected = linear_rows(x[:tokens].clone(), rows)
        for one, other in zip(prepared.run(tokens), expected, strict=True):
            assert torch.equal(one[:tokens], other)
            assert bool(one[tokens:].isnan().all())


def test_with_a_norm() -> None:
    _, rows = packed("formats")
    x = activations("formats", 50)
    norm = normal(512, seed=21).abs() + 0.5
    inner = immediately(rms_norm)(x, norm, 1e-6)
    for one, other in zip(linear_rows(x, rows, norm, 1e-6), linear_rows(inner, rows), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [100, 500])
def test_a_graph_replays_it(tokens: int) -> None:
    _, rows = packed("csa")
    op = PreparedOp(prefill_rows.linear_rows, activations("csa", tokens), rows)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)
