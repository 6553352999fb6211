"""Router: sqrt(softplus) scores, biased selection, unbiased weights, hash layers.

Runs through the torch definition and both forms on a GPU: the router's own launches and the decode
launch of the experts, which routes itself; both take any number of tokens that the tests have.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.ops import router as reference
from dsv4.ops.immediate import immediately
from dsv4.ops.router import Router
from dsv4.ops.router.prefill import route
from dsv4.weights.quant import QuantTensor, Weight
from tests.ops.cases import BACKENDS, VECTORS, by_device, integers, normal, on_device
from tests.ops.conftest import skipping_float32
from tests.ops.moe.routes import decode_routes

SCALING = 1.5
Route = Callable[[Tensor, Tensor, Router], tuple[Tensor, Tensor]]
# The torch definition and both forms on a GPU: for a prefill chunk, and in the decode launch of the
# experts.
FORMS: dict[str, tuple[str, Route]] = {"torch": ("torch", reference.route)}
if "cuda" in BACKENDS:
    FORMS["cuda prefill"] = ("cuda", skipping_float32(immediately(route)))
    FORMS["cuda decode"] = ("cuda", skipping_float32(decode_routes))


@dataclass(frozen=True)
class Routing:
    """``dsv4.ops.router``, with dense gates."""

    pack_weight: Callable[[QuantTensor], Weight]
    route: Route

    def learned(self, x_TE: Tensor, gate_XE: Tensor, bias_X: Tensor, count: int, scaling: float):
        router = Router(self.pack_weight(QuantTensor.dense(gate_XE)), bias_X, False, count, scaling)
        return self.route(x_TE, torch.zeros(x_TE.shape[0], dtype=torch.int64), router)

    def hashed(
        self, x_TE: Tensor, gate_XE: Tensor, table_VP: Tensor, tokens_T: Tensor, scaling: float
    ):
        router = Router(
            self.pack_weight(QuantTensor.dense(gate_XE)), table_VP, True, table_VP.shape[1], scaling
        )
        return self.route(x_TE, tokens_T, router)


@pytest.fixture(params=FORMS)
def routing(request: pytest.FixtureRequest) -> Iterator[Routing]:
    """A form of the router; tensors created inside the test live on its device."""
    name, form = FORMS[request.param]
    backend = BACKENDS[name]
    with torch.device(backend.device):
        yield Routing(skipping_float32(backend.ops.pack_weight), form)


def score(logit: float) -> float:
    return math.sqrt(math.log1p(math.exp(-abs(logit))) + max(logit, 0.0))


def log_score(logit: float) -> float:
    """Natural logarithm of the score, without underflow: ln softplus(l) is l far below zero."""
    return 0.5 * logit if logit < -30 else math.log(score(logit))


def gate_for(logits: list[float]) -> Tensor:
    """A gate that gives these logits for the input (1, 0, …)."""
    gate_XE = torch.zeros(len(logits), 16)
    gate_XE[:, 0] = torch.tensor(logits)
    return gate_XE


def first_unit() -> torch.Tensor:
    return torch.eye(1, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_learned_routing_equals_the_formula(routing: Routing, dtype: torch.dtype) -> None:
    x_TE = normal(6, 64, seed=1, dtype=dtype)
    bias_X = normal(32, seed=2)
    weight = normal(32, 64, seed=3, scale=0.3, dtype=torch.bfloat16)
    ids_TP, weights_TP = routing.learned(x_TE, weight, bias_X, 4, SCALING)
    assert (ids_TP.dtype, weights_TP.dtype) == (torch.int64, torch.float32)
    for x, ids, weights in zip(x_TE, ids_TP.tolist(), weights_TP, strict=True):
        scores = [score(float(row.double() @ x.double())) for row in weight]
        assert ids == sorted(range(32), key=lambda e: -(scores[e] + float(bias_X[e])))[:4]
        total = sum(scores[e] for e in ids)
        assert weights.tolist() == pytest.approx(
            [scores[e] / total * SCALING for e in ids], rel=by_device(1e-6, 1e-5)
        )


def test_published_scores(routing: Routing) -> None:
    """Weights of a pair are in the ratio of their scores."""
    published = {float(logit): value for logit, value in VECTORS["sqrtsoftplus"].items()}
    for logit, value in published.items():
        _, weights_TP = routing.learned(
            first_unit(), gate_for([0.0, logit]), torch.tensor([1e3, 0.0]), 2, 1.0
        )
        assert float(weights_TP[0, 1] / weights_TP[0, 0]) == pytest.approx(
            value / published[0.0], rel=2e-6
        )


def test_lesson_06_hash_layers_take_weights_from_the_gate(routing: Routing) -> None:
    x_TE = normal(5, 64, seed=4)
    table_VP = integers(0, 31, 10, 4, seed=5, dtype=torch.int64)
    weight = normal(32, 64, seed=6, scale=0.3)
    tokens_T = on_device(torch.tensor([3, 3, 9, 0, 1]))
    ids_TP, weights_TP = routing.hashed(x_TE, weight, table_VP, tokens_T, SCALING)
    assert torch.equal(ids_TP, table_VP[tokens_T])
    for x, ids, weights in zip(x_TE, ids_TP.tolist(), weights_TP, strict=True):
        scores = [score(float(weight[e].double() @ x.double())) for e in ids]
        assert weights.tolist() == pytest.approx(
            [s / sum(scores) * SCALING for s in scores], rel=by_device(1e-6, 1e-5)
        )


def test_bias_moves_the_selection_but_not_the_weights(routing: Routing) -> None:
    gate = gate_for([2.0, 1.0, 0.0, -1.0])
    bias_X = torch.tensor([-10.0, 0.0, 0.0, 10.0])
    ids_TP, weights_TP = routing.learned(first_unit(), gate, bias_X, 2, 1.0)
    assert ids_TP.tolist() == [[3, 1]]
    total = score(-1.0) + score(1.0)
    assert weights_TP[0].tolist() == pytest.approx(
        [score(-1.0) / total, score(1.0) / total], rel=1e-6
    )


def test_ties_go_to_the_lowest_expert(routing: Routing) -> None:
    """As many experts as Pro has: an unstable sort keeps the order of a few by accident."""
    logits = [0.0] * 384
    for expert in (7, 130, 131, 200, 383):
        logits[expert] = 1.0
    for count, expected in ((3, [7, 130, 131]), (7, [7, 130, 131, 200, 383, 0, 1])):
        ids_TP, _ = routing.learned(first_unit(), gate_for(logits), torch.zeros(384), count, 1.0)
        assert ids_TP.tolist() == [expected]


@pytest.mark.parametrize("logit", [-15.0, -20.0, -100.0, -300.0, -1e4])
def test_spec11_d27_very_negative_logits_keep_their_weights(routing: Routing, logit: float) -> None:
    gate = gate_for([logit, logit - 2.0, logit])
    ids_TP, weights_TP = routing.learned(first_unit(), gate, torch.zeros(3), 3, SCALING)
    lower = math.exp(-1.0)
    exact = [1 / (2 + lower), lower / (2 + lower), 1 / (2 + lower)]
    for expert, weight in zip(ids_TP[0].tolist(), weights_TP[0].tolist(), strict=True):
        assert weight == pytest.approx(exact[expert] * SCALING, rel=by_device(1e-6, 1e-4))


@pytest.mark.parametrize("scaling", [1.0, 1.5, 2.5])
def test_spec11_d28_weights_sum_to_the_scaling_factor_once(
    routing: Routing, scaling: float
) -> None:
    gate = normal(16, 32, seed=7)
    x_TE = normal(8, 32, seed=8)
    _, learned = routing.learned(x_TE, gate, torch.zeros(16), 6, scaling)
    table_VP = torch.arange(6).repeat(4, 1)
    _, hashed = routing.hashed(x_TE, gate, table_VP, torch.zeros(8, dtype=torch.int64), scaling)
    for weights_TP in (learned, hashed):
        torch.testing.assert_close(weights_TP.sum(1), torch.full((8,), scaling))


@pytest.mark.parametrize(
    "logit", [-1e4, -300.0, -100.0, -15.001, -15.0, -14.999, -1e-3, 0.0, 19.9, 20.1, 300.0]
)
def test_scores_are_continuous_and_right_over_the_whole_range(
    routing: Routing, logit: float
) -> None:
    """Against an expert of the same logit plus 1, so that no weight underflows."""
    _, weights_TP = routing.learned(
        first_unit(), gate_for([logit, logit + 1.0]), torch.tensor([9.0, 0.0]), 2, 1.0
    )
    lower, upper = (log_score(float(torch.tensor(value))) for value in (logit, logit + 1.0))
    exact = 1 / (1 + math.exp(upper - lower))
    assert sorted(weights_TP[0].tolist())[0] == pytest.approx(
        exact, rel=by_device(1e-6, 2e-4 if abs(logit) > 1e3 else 1e-5)
    )


def test_very_negative_scores_can_win_by_their_bias(routing: Routing) -> None:
    ids_TP, weights_TP = routing.learned(
        first_unit(), gate_for([5.0, -300.0, 0.0]), torch.tensor([0.0, 50.0, -9.0]), 2, 1.0
    )
    assert ids_TP.tolist() == [[1, 0]]
    assert weights_TP[0].tolist() == pytest.approx([0.0, 1.0])


def test_equal_gate_rows_share_the_weight_equally(routing: Routing) -> None:
    gate = normal(1, 64, seed=9).repeat(8, 1)
    ids_TP, weights_TP = routing.learned(normal(3, 64, seed=10), gate, torch.zeros(8), 4, 2.0)
    assert ids_TP.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(weights_TP, torch.full((3, 4), 0.5))


@pytest.mark.parametrize("where", ["token", "gate", "bias"])
def test_spec11_j68_nan_scores_choose_experts_that_exist_once(routing: Routing, where: str) -> None:
    x_TE = normal(3, 64, seed=11, dtype=torch.bfloat16)
    gate = normal(40, 64, seed=12, dtype=torch.bfloat16)
    bias_X = normal(40, seed=13)
    {"token": x_TE[1], "gate": gate[7:9], "bias": bias_X}[where][...] = torch.nan
    ids_TP, _ = routing.learned(x_TE, gate, bias_X, 6, SCALING)
    for ids in ids_TP.tolist():
        assert len(set(ids)) == 6
        assert all(0 <= expert < 40 for expert in ids)
