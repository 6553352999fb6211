"""Router: sqrt(softplus) scores, biased selection, unbiased weights, hash layers."""

import math

import pytest
import torch

from dsv4.ops import Ops
from dsv4.quant import QuantTensor, Weight
from tests.ops.cases import VECTORS, integers, normal, on_device

SCALING = 1.5


def score(logit: float) -> float:
    return math.sqrt(math.log1p(math.exp(-abs(logit))) + max(logit, 0.0))


def log_score(logit: float) -> float:
    """Natural logarithm of the score, without underflow: ln softplus(l) is l far below zero."""
    return 0.5 * logit if logit < -30 else math.log(score(logit))


def gate_for(ops: Ops, logits: list[float]) -> Weight:
    """A gate that gives these logits for the input (1, 0, …)."""
    weight = torch.zeros(len(logits), 16)
    weight[:, 0] = torch.tensor(logits)
    return ops.pack_weight(QuantTensor.dense(weight))


def first_unit() -> torch.Tensor:
    return torch.eye(1, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_learned_routing_equals_the_formula(ops: Ops, dtype: torch.dtype) -> None:
    x_TE, bias_X = normal(6, 64, seed=1, dtype=dtype), normal(32, seed=2)
    weight = normal(32, 64, seed=3, scale=0.3, dtype=torch.bfloat16)
    ids_TP, weights_TP = ops.route_learned(x_TE, ops.pack_weight(QuantTensor.dense(weight)), bias_X, 4, SCALING)
    assert (ids_TP.dtype, weights_TP.dtype) == (torch.int64, torch.float32)
    for x, ids, weights in zip(x_TE, ids_TP.tolist(), weights_TP, strict=True):
        scores = [score(float(row.double() @ x.double())) for row in weight]
        assert ids == sorted(range(32), key=lambda e: -(scores[e] + float(bias_X[e])))[:4]
        total = sum(scores[e] for e in ids)
        assert weights.tolist() == pytest.approx([scores[e] / total * SCALING for e in ids], rel=1e-5)


def test_published_scores(ops: Ops) -> None:
    """Weights of a pair are in the ratio of their scores."""
    published = {float(logit): value for logit, value in VECTORS["sqrtsoftplus"].items()}
    for logit, value in published.items():
        _, weights_TP = ops.route_learned(first_unit(), gate_for(ops, [0.0, logit]), torch.tensor([1e3, 0.0]), 2, 1.0)
        assert float(weights_TP[0, 1] / weights_TP[0, 0]) == pytest.approx(value / published[0.0], rel=2e-6)


def test_lesson_06_hash_layers_take_weights_from_the_gate(ops: Ops) -> None:
    x_TE, table_VP = normal(5, 64, seed=4), integers(0, 31, 10, 4, seed=5, dtype=torch.int64)
    weight = QuantTensor.dense(normal(32, 64, seed=6, scale=0.3))
    tokens_T = on_device(torch.tensor([3, 3, 9, 0, 1]))
    ids_TP, weights_TP = ops.route_hash(x_TE, ops.pack_weight(weight), table_VP, tokens_T, SCALING)
    assert torch.equal(ids_TP, table_VP[tokens_T])
    for x, ids, weights in zip(x_TE, ids_TP.tolist(), weights_TP, strict=True):
        scores = [score(float(weight.data[e].double() @ x.double())) for e in ids]
        assert weights.tolist() == pytest.approx([s / sum(scores) * SCALING for s in scores], rel=1e-5)


def test_bias_moves_the_selection_but_not_the_weights(ops: Ops) -> None:
    gate = gate_for(ops, [2.0, 1.0, 0.0, -1.0])
    bias_X = torch.tensor([-10.0, 0.0, 0.0, 10.0])
    ids_TP, weights_TP = ops.route_learned(first_unit(), gate, bias_X, 2, 1.0)
    assert ids_TP.tolist() == [[3, 1]]
    total = score(-1.0) + score(1.0)
    assert weights_TP[0].tolist() == pytest.approx([score(-1.0) / total, score(1.0) / total], rel=1e-6)


def test_ties_go_to_the_lowest_expert(ops: Ops) -> None:
    """As many experts as Pro has: a sort that is not stable keeps the order of a few by accident."""
    logits = [0.0] * 384
    for expert in (7, 130, 131, 200, 383):
        logits[expert] = 1.0
    for count, expected in ((3, [7, 130, 131]), (7, [7, 130, 131, 200, 383, 0, 1])):
        ids_TP, _ = ops.route_learned(first_unit(), gate_for(ops, logits), torch.zeros(384), count, 1.0)
        assert ids_TP.tolist() == [expected]


@pytest.mark.parametrize("logit", [-15.0, -20.0, -100.0, -300.0, -1e4])
def test_spec11_d27_very_negative_logits_keep_their_weights(ops: Ops, logit: float) -> None:
    gate = gate_for(ops, [logit, logit - 2.0, logit])
    ids_TP, weights_TP = ops.route_learned(first_unit(), gate, torch.zeros(3), 3, SCALING)
    lower = math.exp(-1.0)
    exact = [1 / (2 + lower), lower / (2 + lower), 1 / (2 + lower)]
    for expert, weight in zip(ids_TP[0].tolist(), weights_TP[0].tolist(), strict=True):
        assert weight == pytest.approx(exact[expert] * SCALING, rel=1e-4)


@pytest.mark.parametrize("scaling", [1.0, 1.5, 2.5])
def test_spec11_d28_weights_sum_to_the_scaling_factor_once(ops: Ops, scaling: float) -> None:
    gate = ops.pack_weight(QuantTensor.dense(normal(16, 32, seed=7)))
    x_TE = normal(8, 32, seed=8)
    _, learned = ops.route_learned(x_TE, gate, torch.zeros(16), 6, scaling)
    table_VP = torch.arange(6).expand(4, 6)
    _, hashed = ops.route_hash(x_TE, gate, table_VP, torch.zeros(8, dtype=torch.int64), scaling)
    for weights_TP in (learned, hashed):
        torch.testing.assert_close(weights_TP.sum(1), torch.full((8,), scaling))


@pytest.mark.parametrize("logit", [-1e4, -300.0, -100.0, -15.001, -15.0, -14.999, -1e-3, 0.0, 19.9, 20.1, 300.0])
def test_scores_are_continuous_and_right_over_the_whole_range(ops: Ops, logit: float) -> None:
    """Against an expert of the same logit plus 1, so that no weight underflows."""
    _, weights_TP = ops.route_learned(
        first_unit(), gate_for(ops, [logit, logit + 1.0]), torch.tensor([9.0, 0.0]), 2, 1.0
    )
    lower, upper = (log_score(float(torch.tensor(value))) for value in (logit, logit + 1.0))
    exact = 1 / (1 + math.exp(upper - lower))
    assert sorted(weights_TP[0].tolist())[0] == pytest.approx(exact, rel=2e-4 if abs(logit) > 1e3 else 1e-5)


def test_very_negative_scores_can_win_by_their_bias(ops: Ops) -> None:
    ids_TP, weights_TP = ops.route_learned(
        first_unit(), gate_for(ops, [5.0, -300.0, 0.0]), torch.tensor([0.0, 50.0, -9.0]), 2, 1.0
    )
    assert ids_TP.tolist() == [[1, 0]]
    assert weights_TP[0].tolist() == pytest.approx([0.0, 1.0])


def test_equal_gate_rows_share_the_weight_equally(ops: Ops) -> None:
    gate = ops.pack_weight(QuantTensor.dense(normal(1, 64, seed=9).repeat(8, 1)))
    ids_TP, weights_TP = ops.route_learned(normal(3, 64, seed=10), gate, torch.zeros(8), 4, 2.0)
    assert ids_TP.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(weights_TP, torch.full((3, 4), 0.5))


def test_no_tokens(ops: Ops) -> None:
    gate = ops.pack_weight(QuantTensor.dense(normal(8, 64, seed=11)))
    ids_TP, weights_TP = ops.route_learned(torch.empty(0, 64), gate, torch.zeros(8), 3, 1.0)
    assert (ids_TP.shape, weights_TP.shape) == ((0, 3), (0, 3))
