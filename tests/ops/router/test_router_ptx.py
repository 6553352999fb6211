"""The router's selection of given logits, executed on the CPU: exactly the experts of float64 with
their weights, also among ties, NaN and token ids that no table has.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.router import Router
from dsv4.ops.router.prefill import route
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantTensor
from tests.ops.cases import integers
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

CPU = torch.device("cpu")
TOKENS = 11
MOST = 13
SCALING = 2.5
FAULTS = {
    "ties go to the highest expert": SourceEdit(
        "router.cuh",
        "expert = __reduce_min_sync(~0u, expert);",
        "expert = __reduce_max_sync(~0u, expert == ~0u ? 0 : expert);",
    ),
    "weights are those of the first experts": SourceEdit(
        "router.cuh", "value = __shfl_sync(~0u, score[i],", "value = __shfl_sync(~0u, score[0],"
    ),
    "nobody hears of NaN": SourceEdit("router.cu", "note_nan(nan, weight);", ""),
}


class Routed:
    """``router_select`` of logits ``[T, X]``: what it wrote, for fewer tokens than recorded."""

    def __init__(
        self,
        logits_TX: Tensor,
        selection: Tensor,
        per_token: int,
        tokens_T: Tensor | None = None,
        edit: SourceEdit | None = None,
    ) -> None:
        experts = logits_TX.shape[1]
        # Rows lie apart, as those of a product of padded width.
        wide = torch.full((MOST, experts + 3), torch.nan)
        wide[:TOKENS, :experts] = logits_TX
        gate = pack_weight(QuantTensor.dense(torch.zeros(experts, 8).bfloat16()))
        hashed = tokens_T is not None
        router: Router[PackedWeight] = Router(gate, selection, hashed, per_token, SCALING)
        self.nan_1 = torch.zeros(1, dtype=torch.int32)
        recording = Recording(Target(CPU, "sm_90a", 132), MOST, self.nan_1)
        ids_T = torch.zeros(MOST, dtype=torch.int64)
        if tokens_T is not None:
            ids_T[:TOKENS] = tokens_T
        x_TE = torch.zeros(MOST, 8).bfloat16()
        ids_TP, weights_TP = route(recording, x_TE, ids_T, router, lambda *_: wide[:, :experts])
        real = execute(recording, TOKENS, edit)
        assert (real(ids_TP)[TOKENS:] == -1).all()
        assert real(weights_TP)[TOKENS:].isnan().all()
        self.ids_TP = real(ids_TP)[:TOKENS]
        self.weights_TP = real(weights_TP)[:TOKENS]


def log_scores(logits_TX: Tensor) -> Tensor:
    wide = logits_TX.double()
    # log1p(e^l) is e^l where that is small.
    return 0.5 * torch.where(wide < -30, wide, torch.nn.functional.softplus(wide).log())


def assert_learned(
    experts: int,
    per_token: int,
    edit: SourceEdit | None = None,
) -> None:
    """Logits and biases of few values: many are equal, and others lie far apart."""
    logits_TX = integers(-80, 80, TOKENS, experts, seed=experts) / 4
    logits_TX[0] = 1.0
    logits_TX[1] = integers(0, 1, experts, seed=1)
    logits_TX[2] = -100.0
    bias_X = integers(0, 1, experts, seed=2) / 8
    bias_X[: experts // 2] = 0.0
    found = Routed(logits_TX, bias_X, per_token, edit=edit)
    score_TX = log_scores(logits_TX).exp() + bias_X.double()
    order_TX = score_TX.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found.ids_TP, order_TX[:, :per_token])
    assert_weights(found, logits_TX)
    assert int(found.nan_1) == 0


def assert_weights(found: Routed, logits_TX: Tensor) -> None:
    chosen_TP = log_scores(logits_TX).gather(1, found.ids_TP)
    exact_TP = torch.softmax(chosen_TP, dim=-1) * SCALING
    assert ((found.weights_TP - exact_TP).abs() < 5e-6).all()


@pytest.mark.parametrize(("experts", "per_token"), [(384, 6), (256, 6), (37, 16), (8, 8), (1, 1)])
def test_the_best_experts(experts: int, per_token: int) -> None:
    assert_learned(experts, per_token)


def test_experts_of_a_table() -> None:
    logits_TX = integers(-80, 80, TOKENS, 100, seed=3) / 4
    table_VP = integers(0, 99, 20, 6, seed=4, dtype=torch.int64)
    tokens_T = integers(0, 19, TOKENS, seed=5, dtype=torch.int64)
    tokens_T[[1, 2]] = torch.tensor([-5, 10**12])
    found = Routed(logits_TX, table_VP, 6, tokens_T)
    assert torch.equal(found.ids_TP, table_VP[tokens_T.clamp(0, 19)])
    assert_weights(found, logits_TX)


def assert_nan_is_noted(edit: SourceEdit | None = None) -> None:
    """NaN comes first, as in torch; only of logits it shows in the weights."""
    logits_TX = integers(-80, 80, TOKENS, 40, seed=6) / 4
    bias_X = torch.zeros(40)
    bias_X[[3, 17]] = torch.nan
    found = Routed(logits_TX, bias_X, 6, edit=edit)
    assert (found.ids_TP[:, :2] == torch.tensor([3, 17])).all()
    assert int(found.nan_1) == 0
    logits_TX[4, 30] = torch.nan
    found = Routed(logits_TX, bias_X, 6, edit=edit)
    assert found.ids_TP[4, :3].tolist() == [3, 17, 30]
    assert found.weights_TP.isnan().any(dim=1).nonzero().tolist() == [[4]]
    assert int(found.nan_1) == 1


def test_nan_comes_first_and_is_noted() -> None:
    assert_nan_is_noted()


def assert_both(edit: SourceEdit) -> None:
    assert_learned(37, 6, edit=edit)
    assert_nan_is_noted(edit)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_both(FAULTS[fault])
