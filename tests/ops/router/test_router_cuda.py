"""Both forms of the router on real shapes: its own launches, and the decode launch of the experts,
which routes itself.

Ids are exactly those of the torch reference except where scores are within rounding.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.ops import router as reference
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.moe.decode import moe
from dsv4.ops.router import Router, prefill
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantTensor
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.moe.routes import decode_routes, on_zero_experts

pytestmark = pytest.mark.gpu

route = immediately(prefill.route)
Form = Callable[[Tensor, Tensor, Router], tuple[Tensor, Tensor]]

SHAPES = {
    "pro": (7168, 384),
    "flash": (4096, 256),
    "demo": (256, 16),
    "tiny": (128, 8),
    "odd": (72, 37),
}
DECODE = [(decode_routes, tokens) for tokens in (1, 2, 3, 8)]
ANY = [(route, tokens) for tokens in (1, 3, 9, 64, 1000)]


def inputs(width: int, experts: int, tokens: int, seed: int = 0):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda")  # noqa: E731
    x_TE = draw(tokens, width).bfloat16()
    weight = (draw(experts, width) * width**-0.5).bfloat16()
    return x_TE, QuantTensor.dense(weight), draw(experts) * 0.1


def learned(
    form: Form, x_TE: Tensor, gate: QuantTensor, bias_X: Tensor, per_token: int, scaling: float
):
    """A form of the router with a bias."""
    tokens_T = torch.zeros(x_TE.shape[0], dtype=torch.int64, device="cuda")
    return form(x_TE, tokens_T, Router(pack_weight(gate), bias_X, False, per_token, scaling))


def hashed(
    form: Form, x_TE: Tensor, gate: QuantTensor, table_VP: Tensor, tokens_T: Tensor, scaling: float
):
    """A form of the router with a table."""
    return form(
        x_TE, tokens_T, Router(pack_weight(gate), table_VP, True, table_VP.shape[1], scaling)
    )


def exact_log_scores(x_TE: torch.Tensor, gate: QuantTensor) -> torch.Tensor:
    logits = x_TE.double() @ gate.data.double().T
    return 0.5 * torch.log(torch.nn.functional.softplus(logits))


@pytest.mark.parametrize(("form", "tokens"), DECODE + ANY)
@pytest.mark.parametrize("shape", SHAPES)
def test_learned(shape: str, form: Form, tokens: int) -> None:
    width, experts = SHAPES[shape]
    per_token = min(6, experts)
    x_TE, gate, bias_X = inputs(width, experts, tokens)
    poison(1 << 20)
    ids_TP, weights_TP = learned(form, x_TE, gate, bias_X, per_token, 2.5)
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


@pytest.mark.parametrize(("form", "tokens"), DECODE + ANY)
@pytest.mark.parametrize("shape", ["pro", "flash", "tiny"])
def test_hash(shape: str, form: Form, tokens: int) -> None:
    width, experts = SHAPES[shape]
    x_TE, gate, _ = inputs(width, experts, tokens)
    table_VP = torch.randint(0, experts, (100, 6), device="cuda")
    tokens_T = torch.randint(0, 100, (tokens,), device="cuda")
    poison(1 << 20)
    ids_TP, weights_TP = hashed(form, x_TE, gate, table_VP, tokens_T, 1.5)
    assert torch.equal(ids_TP, table_VP[tokens_T])
    exact = torch.softmax(exact_log_scores(x_TE, gate).gather(1, ids_TP), dim=-1) * 1.5
    assert float((weights_TP - exact).abs().max()) < 5e-6


@pytest.mark.parametrize(("form", "tokens"), [(decode_routes, 4), (route, 12)])
def test_exact_sums_give_exactly_the_reference_ids(form: Form, tokens: int) -> None:
    """Small whole numbers: logits are exact in every order of summation, and many are equal."""
    x_TE = torch.randint(-2, 3, (tokens, 512), device="cuda").bfloat16()
    gate = QuantTensor.dense(torch.randint(-1, 2, (384, 512), device="cuda").bfloat16() / 16)
    bias_X = torch.randint(0, 2, (384,), device="cuda").float()
    expected = reference.route_learned(x_TE, gate, bias_X, 6, 2.5)
    ids_TP, weights_TP = learned(form, x_TE, gate, bias_X, 6, 2.5)
    assert torch.equal(ids_TP, expected[0])
    torch.testing.assert_close(weights_TP, expected[1], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize(("form", "tokens"), [(decode_routes, 1), (decode_routes, 8), (route, 10)])
def test_nan_comes_first_as_in_torch(form: Form, tokens: int) -> None:
    x_TE, gate, bias_X = inputs(256, 40, tokens)
    bias_X[[3, 17]] = torch.nan
    bias_X[5] = -torch.inf
    expected = reference.route_learned(x_TE, gate, bias_X, 6, 1.0)
    ids_TP, weights_TP = learned(form, x_TE, gate, bias_X, 6, 1.0)
    assert torch.equal(ids_TP, expected[0])
    assert ids_TP[0, :2].tolist() == [3, 17]
    x_TE[0, 0] = torch.nan
    ids_TP, weights_TP = learned(form, x_TE, gate, bias_X, 6, 1.0)
    assert ids_TP[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert bool(weights_TP[0].isnan().all())
    assert not bool(weights_TP[1:].isnan().any())


@pytest.mark.parametrize("form", [decode_routes, route])
def test_token_outside_the_table_reads_no_stray_memory(form: Form) -> None:
    x_TE, gate, _ = inputs(256, 16, 2)
    table_VP = torch.randint(0, 16, (10, 6), device="cuda")
    ids_TP, _ = hashed(form, x_TE, gate, table_VP, torch.tensor([-5, 10**12], device="cuda"), 1.0)
    assert torch.equal(ids_TP, table_VP[[0, 9]])


@pytest.mark.parametrize(("form", "tokens"), [(decode_routes, 1), (decode_routes, 8), (route, 40)])
def test_replay_and_no_synchronisation(form: Form, tokens: int) -> None:
    x_TE, gate, bias_X = inputs(4096, 256, tokens)
    router = Router(pack_weight(gate), bias_X, False, 6, 1.5)
    tokens_T = torch.zeros(tokens, device="cuda").long()
    if form is decode_routes:
        op = PreparedOp(moe, *on_zero_experts(x_TE, tokens_T, router))
    else:
        op = PreparedOp(prefill.route, x_TE, tokens_T, router)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)


def test_a_recording_of_the_longest_chunk_routes_shorter_ones() -> None:
    x_TE, gate, bias_X = inputs(4096, 256, 300)
    router = Router(pack_weight(gate), bias_X, False, 6, 1.5)
    tokens_T = torch.zeros(300, device="cuda").long()
    op = PreparedOp(prefill.route, x_TE, tokens_T, router)
    for tokens in (300, 9, 128, 300):
        expected = route(x_TE[:tokens], tokens_T[:tokens], router)
        for found, exact in zip(op.run(tokens), expected, strict=True):
            assert torch.equal(found[:tokens], exact)


def test_bad_arguments() -> None:
    x_TE, gate, bias_X = inputs(256, 16, 2)
    with pytest.raises(ValueError, match="x_TE"):
        learned(route, x_TE.float(), gate, bias_X, 2, 1.0)
    with pytest.raises(ValueError, match="selection"):
        learned(route, x_TE, gate, bias_X[:5], 2, 1.0)
    with pytest.raises(ValueError, match="experts_per_token"):
        learned(route, x_TE, gate, bias_X, 17, 1.0)
    table_VP = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="tokens_T"):
        hashed(route, x_TE, gate, table_VP, torch.zeros(2, device="cuda"), 1.0)
