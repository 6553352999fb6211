"""Router kernels on real shapes: ids exactly those of the torch reference except where scores are within rounding."""

import pytest
import torch

from dsv4.ops import router as reference
from dsv4.ops.cuda.packed import pack_weight
from dsv4.ops.cuda.router import route_hash, route_learned
from dsv4.quant import QuantTensor
from tests.ops.cuda.gpu import assert_no_synchronisation, assert_replay_is_eager, poison

pytestmark = pytest.mark.gpu

SHAPES = {"pro": (7168, 384), "flash": (4096, 256), "demo": (256, 16), "tiny": (128, 8), "odd": (72, 37)}
TOKENS = [1, 2, 3, 8, 9, 64, 1000]


def inputs(width: int, experts: int, tokens: int, seed: int = 0):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda")  # noqa: E731
    x_TE, weight = draw(tokens, width).bfloat16(), (draw(experts, width) * width**-0.5).bfloat16()
    return x_TE, QuantTensor.dense(weight), draw(experts) * 0.1


def exact_log_scores(x_TE: torch.Tensor, gate: QuantTensor) -> torch.Tensor:
    logits = x_TE.double() @ gate.data.double().T
    return 0.5 * torch.log(torch.nn.functional.softplus(logits))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_learned(shape: str, tokens: int) -> None:
    width, experts = SHAPES[shape]
    per_token = min(6, experts)
    x_TE, gate, bias_X = inputs(width, experts, tokens)
    poison(1 << 20)
    ids_TP, weights_TP = route_learned(x_TE, pack_weight(gate), bias_X, per_token, 2.5)
    log_TX = exact_log_scores(x_TE, gate)
    score_TX = log_TX.exp() + bias_X.double()
    expected = score_TX.sort(dim=-1, descending=True, stable=True)
    found = score_TX.gather(1, ids_TP)
    assert bool((ids_TP.sort(dim=1).values.diff(dim=1) > 0).all()), "an expert twice"
    worse = float((found - expected.values[:, :per_token]).abs().max())
    assert worse < 2e-6, f"not the best experts: {worse}"
    differing = int((ids_TP != expected.indices[:, :per_token]).sum())
    print(f"{shape} T={tokens}: {differing} ids differ within rounding")
    exact = torch.softmax(log_TX.gather(1, ids_TP), dim=-1) * 2.5
    assert float((weights_TP - exact).abs().max()) < 5e-6


@pytest.mark.parametrize("tokens", [1, 5, 8, 33])
@pytest.mark.parametrize("shape", ["pro", "flash", "tiny"])
def test_hash(shape: str, tokens: int) -> None:
    width, experts = SHAPES[shape]
    x_TE, gate, _ = inputs(width, experts, tokens)
    table_VP = torch.randint(0, experts, (100, 6), device="cuda")
    tokens_T = torch.randint(0, 100, (tokens,), device="cuda")
    poison(1 << 20)
    ids_TP, weights_TP = route_hash(x_TE, pack_weight(gate), table_VP, tokens_T, 1.5)
    assert torch.equal(ids_TP, table_VP[tokens_T])
    exact = torch.softmax(exact_log_scores(x_TE, gate).gather(1, ids_TP), dim=-1) * 1.5
    assert float((weights_TP - exact).abs().max()) < 5e-6


@pytest.mark.parametrize("tokens", [4, 12])
def test_exact_sums_give_exactly_the_reference_ids(tokens: int) -> None:
    """Small whole numbers: logits are exact in every order of summation, and many are equal."""
    x_TE = torch.randint(-2, 3, (tokens, 512), device="cuda").bfloat16()
    gate = QuantTensor.dense(torch.randint(-1, 2, (384, 512), device="cuda").bfloat16() / 16)
    bias_X = torch.randint(0, 2, (384,), device="cuda").float()
    expected = reference.route_learned(x_TE, gate, bias_X, 6, 2.5)
    ids_TP, weights_TP = route_learned(x_TE, pack_weight(gate), bias_X, 6, 2.5)
    assert torch.equal(ids_TP, expected[0])
    torch.testing.assert_close(weights_TP, expected[1], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("tokens", [1, 8, 10])
def test_nan_comes_first_as_in_torch(tokens: int) -> None:
    x_TE, gate, bias_X = inputs(256, 40, tokens)
    bias_X[[3, 17]] = torch.nan
    bias_X[5] = -torch.inf
    expected = reference.route_learned(x_TE, gate, bias_X, 6, 1.0)
    ids_TP, weights_TP = route_learned(x_TE, pack_weight(gate), bias_X, 6, 1.0)
    assert torch.equal(ids_TP, expected[0])
    assert ids_TP[0, :2].tolist() == [3, 17]
    x_TE[0, 0] = torch.nan
    ids_TP, weights_TP = route_learned(x_TE, pack_weight(gate), bias_X, 6, 1.0)
    assert ids_TP[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert bool(weights_TP[0].isnan().all())
    assert not bool(weights_TP[1:].isnan().any())


def test_token_outside_the_table_reads_no_stray_memory() -> None:
    x_TE, gate, _ = inputs(256, 16, 2)
    table_VP = torch.randint(0, 16, (10, 6), device="cuda")
    ids_TP, _ = route_hash(x_TE, pack_weight(gate), table_VP, torch.tensor([-5, 10**12], device="cuda"), 1.0)
    assert torch.equal(ids_TP, table_VP[[0, 9]])


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_replay_and_no_synchronisation(tokens: int) -> None:
    x_TE, gate, bias_X = inputs(4096, 256, tokens)
    packed = pack_weight(gate)
    call = lambda: route_learned(x_TE, packed, bias_X, 6, 1.5)  # noqa: E731
    assert_replay_is_eager(call)
    assert_no_synchronisation(call)


def test_bad_arguments() -> None:
    x_TE, gate, bias_X = inputs(256, 16, 2)
    packed = pack_weight(gate)
    with pytest.raises(ValueError, match="x_TE"):
        route_learned(x_TE.float(), packed, bias_X, 2, 1.0)
    with pytest.raises(ValueError, match="bias_X"):
        route_learned(x_TE, packed, bias_X[:5], 2, 1.0)
    with pytest.raises(ValueError, match="experts_per_token"):
        route_learned(x_TE, packed, bias_X, 17, 1.0)
    table_VP = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="tokens_T"):
        route_hash(x_TE, packed, table_VP, torch.zeros(2, device="cuda"), 1.0)
