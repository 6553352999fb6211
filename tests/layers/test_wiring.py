"""What the layers hand to their ops, against the formulas of docs/model.md computed in float64.

A recording op table shows the arguments. The whole model is compared with transformers elsewhere;
here a wrong wire is named.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsv4.layers.head import Head
from dsv4.layers.hyper_connection import HyperConnection, Unmixed
from dsv4.layers.moe import MoE
from dsv4.layers.weights import WeightReader
from dsv4.ops import TORCH, TORCH_PACKING
from dsv4.ops.router import route
from tests.layers.recorder import BOUND, CONFIG, TOKENS, WEIGHTS, Recorder, matrix, vector
from tests.ops.cases import assert_near, normal


def run_moe(layer: int, hashed: bool) -> tuple[Recorder, Tensor]:
    recorder = Recorder()
    reader = WeightReader(WEIGHTS, TORCH_PACKING).below(f"layers.{layer}.ffn")
    x_TE = normal(TOKENS, CONFIG.hidden_size, seed=51)
    MoE.build(CONFIG, reader, hashed)(recorder.table(), x_TE, 2 * torch.arange(TOKENS))
    return recorder, x_TE


@pytest.mark.parametrize(("layer", "hashed"), [(0, True), (1, False)], ids=["hashed", "learned"])
def test_lesson_06_routing_weights_come_from_the_gate(layer: int, hashed: bool) -> None:
    recorder, x_TE = run_moe(layer, hashed)
    ((found_TE, tokens_T, router, *_),) = recorder.arguments("moe")
    assert torch.equal(found_TE, x_TE)
    ids_TP, weights_TP = route(found_TE, tokens_T, router)
    scores = torch.nn.functional.softplus(
        x_TE.double() @ matrix(f"layers.{layer}.ffn.gate.weight").T
    ).sqrt()
    if hashed:
        expected = vector(f"layers.{layer}.ffn.gate.tid2eid").long()[2 * torch.arange(TOKENS)]
    else:
        biased = scores + vector(f"layers.{layer}.ffn.gate.bias")
        expected = biased.topk(CONFIG.num_experts_per_tok, dim=1).indices
    assert torch.equal(ids_TP, expected)
    selected = scores.gather(1, expected)
    assert_near(
        weights_TP, selected / selected.sum(1, keepdim=True) * CONFIG.routed_scaling_factor, BOUND
    )
    assert float(selected.std()) > 0.1, "equal weights would prove nothing"


def test_experts_and_the_shared_expert_are_not_mixed_up() -> None:
    ((*_, experts, shared, limit),) = run_moe(1, hashed=False)[0].arguments("moe")
    for projection in ("w1", "w2", "w3"):
        for kind, weights in (("experts", experts), ("shared_experts", shared)):
            found = getattr(weights, projection).dequantize().double()
            assert torch.equal(found, matrix(f"layers.1.ffn.{kind}.{projection}.weight"))
    assert limit == CONFIG.swiglu_limit


@pytest.mark.parametrize("sublayer", ["attn", "ffn"])
def test_seams_use_their_own_parameters(sublayer: str) -> None:
    recorder = Recorder()
    ops = recorder.table()
    reader = WeightReader(WEIGHTS, TORCH_PACKING, "layers.1.")
    seam = HyperConnection.build(CONFIG, reader, sublayer)
    streams_TME = normal(2, CONFIG.hc_mult, CONFIG.hidden_size, seed=52)
    x_TE, residual = seam.enter(ops, streams_TME)
    unmixed = Unmixed(normal(2, CONFIG.hidden_size, seed=54), residual)
    next_TE, next_residual = seam.enter(ops, unmixed)
    ((_, *pre_parameters),) = recorder.arguments("hc_pre")
    (seam_arguments,) = recorder.arguments("hc_seam")
    for mix, norm_weight in (pre_parameters, seam_arguments[4:]):
        for name in ("fn", "base", "scale"):
            assert torch.equal(
                getattr(mix, name).double(), vector(f"layers.1.hc_{sublayer}_{name}")
            )
        assert (mix.norm_eps, mix.hc_eps) == (CONFIG.rms_norm_eps, CONFIG.hc_eps)
        assert mix.sinkhorn_iters == CONFIG.hc_sinkhorn_iters
        assert torch.equal(norm_weight.double(), vector(f"layers.1.{sublayer}_norm.weight"))
    (pre,) = recorder.results("hc_pre")
    (mixed,) = recorder.results("hc_seam")
    assert_same((x_TE, *residual), (pre[0], streams_TME, *pre[1:]))
    assert_same(seam_arguments[:4], (unmixed.y_TE, streams_TME, *pre[1:]))
    assert_same((next_TE, *next_residual), (mixed[1], mixed[0], *mixed[2:]))
    assert_same([seam.mix(ops, unmixed)], [mixed[0]])


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_head_collapses_with_its_own_parameters() -> None:
    recorder = Recorder()
    head = Head.build(CONFIG, WeightReader(WEIGHTS, TORCH_PACKING))
    streams_TME = normal(3, CONFIG.hc_mult, CONFIG.hidden_size, seed=55)
    head.hidden(recorder.table(), streams_TME)
    ((found_TME, collapse, norm_weight),) = recorder.arguments("hc_head")
    assert found_TME is streams_TME
    for name in ("fn", "base", "scale"):
        assert torch.equal(getattr(collapse, name).double(), vector(f"hc_head_{name}"))
    assert (collapse.norm_eps, collapse.hc_eps) == (CONFIG.rms_norm_eps, CONFIG.hc_eps)
    assert torch.equal(norm_weight.double(), vector("norm.weight"))


def test_logits_are_float32_products_of_the_rounded_norm() -> None:
    head = Head.build(CONFIG, WeightReader(WEIGHTS, TORCH_PACKING))
    streams_TME = normal(3, CONFIG.hc_mult, CONFIG.hidden_size, seed=53, dtype=torch.bfloat16)
    hidden_TE = head.hidden(TORCH, streams_TME)
    logits_TV = head.logits(TORCH, hidden_TE)
    assert (hidden_TE.dtype, logits_TV.dtype) == (torch.bfloat16, torch.float32)
    assert_near(logits_TV, hidden_TE.double() @ matrix("head.weight").T, 1e-6)
