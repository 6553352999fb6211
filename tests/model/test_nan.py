"""NaN in any weight ends a run, in prefill and in decode, with the value that it began in, and so
does infinity where the host sees it; what hides NaN most are comparisons.
"""

import math
from typing import Any

import pytest
import torch

from dsv4 import Engine, EngineConfig, ModelConfig, SamplingParams
from dsv4.layers.weights import Weights
from dsv4.ops.tables import TORCH_TABLE
from dsv4.parallel.placement import Placement
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.model.tiny import CPU, random_ids, random_weights, small_config

GREEDY = SamplingParams(temperature=0)
PROMPT = random_ids(40)
# Where NaN in a weight shows first.
PLACES = {
    "layers.1.attn.indexer.weights_proj.weight": "layers.1.indexer.weights at position {first}",
    "layers.1.attn.indexer.wq_b.weight": "layers.1.indexer.q at position {first}",
    "layers.1.attn.indexer.compressor.wkv.weight": "layers.1.indexer.keys at position {entry}",
    "layers.3.attn.indexer.compressor.wgate.weight": "layers.3.indexer.keys at position {entry}",
    "layers.1.attn.compressor.wkv.weight": "layers.1.attn.compressed at position {entry}",
    "layers.1.attn.wkv.weight": "layers.1.attn.kv at position {first}",
    "layers.2.attn.attn_sink": "layers.2.attn.heads at position {first}",
    "layers.0.ffn.gate.weight": "layers.0.router.weights at position {first}",
    "layers.2.ffn.gate.weight": "layers.2.router.weights at position {first}",
    "layers.2.ffn.experts.w1.weight": "layers.2.ffn.output at position {first}",
    "layers.3.ffn.shared_experts.w2.weight": "layers.3.ffn.output at position {first}",
    "norm.weight": "hidden at position {first}",
    "head.weight": "logits at position {last}",
}


def engine_of(weights: Weights, **settings: Any) -> Engine:
    config = ModelConfig.from_dict(small_config())
    exact = {"device": "cpu", "kv_dtype": "bf16", "compute_dtype": "float32", "max_context": 256}
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    return Engine(config, EngineConfig(**{**exact, **settings}), weights, placement, TORCH_TABLE)


@pytest.fixture
def weights() -> Weights:
    """Those of a small model. The torch ops read them in place, so that they can be changed."""
    return random_weights(ModelConfig.from_dict(small_config()))


def tensors(weights: Weights) -> dict[str, torch.Tensor]:
    data = {
        name: weight.data if isinstance(weight, QuantTensor) else weight
        for name, weight in weights.items()
    }
    return {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}


def poison(weights: Weights, name: str) -> None:
    tensors(weights)[name].fill_(math.nan)


@pytest.mark.parametrize("name", PLACES)
def test_nan_in_a_weight_is_noticed_in_prefill(weights: Weights, name: str) -> None:
    poison(weights, name)
    engine = engine_of(weights, prefill_chunk=24)
    place = PLACES[name].format(first=0, entry=3, last=39)
    with pytest.raises(FloatingPointError, match=f"^NaN in {place}$"):
        next(engine.generate(PROMPT, 4, GREEDY))
    assert engine.position == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_nan_in_a_weight_is_noticed_in_decode(weights: Weights, name: str) -> None:
    engine = engine_of(weights)
    tokens = engine.generate(PROMPT, 30, GREEDY, stop_token_ids=())
    expected = [next(tokens) for _ in range(4)]
    kept = tensors(weights)[name].clone()
    poison(weights, name)
    # Of the four tokens three are in the caches.
    place = PLACES[name].format(first=43, entry=43, last=43)
    with pytest.raises(FloatingPointError, match=f"^NaN in {place}$"):
        next(tokens)
    tensors(weights)[name].copy_(kept)
    assert list(engine.generate(PROMPT, 4, GREEDY, stop_token_ids=())) == expected


def test_a_scale_of_nan_is_noticed(weights: Weights) -> None:
    name = "layers.1.attn.indexer.wq_b.weight"
    stored = quantize(weights[name].dequantize(), QuantFormat.FP8_BLOCK128)
    assert stored.block_scale is not None
    stored.block_scale.view(torch.uint8).fill_(255)
    engine = engine_of({**weights, name: stored})
    with pytest.raises(FloatingPointError, match="^NaN in layers.1.indexer.q at position 0$"):
        next(engine.generate(PROMPT, 4, GREEDY))


def test_the_first_token_of_a_later_chunk_is_named(weights: Weights) -> None:
    engine = engine_of(weights, prefill_chunk=20)
    tensors(weights)["embed.weight"][88] = math.nan
    prompt = [88 if index in (30, 35) else min(token, 87) for index, token in enumerate(PROMPT)]
    with pytest.raises(
        FloatingPointError, match="^NaN in layers.0.attn_hc.streams at position 30$"
    ):
        next(engine.generate(prompt, 4, GREEDY))


def test_a_prompt_behind_others_is_refused_without_a_name(weights: Weights) -> None:
    engine = engine_of(weights)
    engine.prefill(PROMPT)
    poison(weights, "layers.1.ffn.gate.weight")
    with pytest.raises(FloatingPointError, match="^NaN or infinity after 50 tokens$"):
        engine.prefill(PROMPT[:10])
    assert engine.position == 0


def test_logits_with_nan_are_the_callers_to_see_but_not_what_they_hide(weights: Weights) -> None:
    engine = engine_of(weights)
    clean = engine.logits(PROMPT)
    kept = tensors(weights)["head.weight"].clone()
    poison(weights, "head.weight")
    assert bool(engine.logits(PROMPT).isnan().all())
    tensors(weights)["head.weight"].copy_(kept)
    assert torch.equal(engine.logits(PROMPT), clean)
    poison(weights, "layers.1.attn.indexer.weights_proj.weight")
    with pytest.raises(FloatingPointError, match="^NaN in layers.1.indexer.weights at position 0$"):
        engine.logits(PROMPT)


def break_head(weights: Weights) -> None:
    """Makes two logits infinite, one in each direction."""
    rows_2E = tensors(weights)["head.weight"][:2]
    rows_2E.zero_()
    rows_2E[:, 0] = torch.tensor([math.inf, -math.inf])


@pytest.mark.parametrize("chunk", [24, 64])
def test_infinity_in_the_logits_of_a_prompt_is_refused_by_name(
    weights: Weights, chunk: int
) -> None:
    break_head(weights)
    engine = engine_of(weights, prefill_chunk=chunk)
    for run in (engine.prefill, lambda ids: engine.prompt_logprobs(ids, 0)):
        with pytest.raises(FloatingPointError, match="^infinity in logits at position 39$"):
            run(PROMPT)
        assert engine.position == 0
    assert bool(engine.logits(PROMPT).isposinf().any())


def test_infinity_in_a_stream_is_named_before_the_nan_that_it_becomes(weights: Weights) -> None:
    tensors(weights)["embed.weight"][PROMPT[30]] = math.inf
    place = f"layers.0.attn_hc.streams at position {PROMPT.index(PROMPT[30])}"
    with pytest.raises(FloatingPointError, match=f"^infinity in {place}$"):
        engine_of(weights, prefill_chunk=20).prefill(PROMPT)


@pytest.mark.parametrize("at_once", [True, False])
def test_log_probabilities_that_are_not_finite_are_refused(weights: Weights, at_once: bool) -> None:
    engine = engine_of(weights)
    tokens = engine.generate(PROMPT, 9, SamplingParams(temperature=0, logprobs=2), ())
    if at_once:
        break_head(weights)
    else:
        assert len([next(tokens) for _ in range(4)]) == 4
        break_head(weights)
    last = 39 if at_once else 43
    with pytest.raises(FloatingPointError, match=f"^infinity in logits at position {last}$"):
        next(tokens)
    assert engine.position == 0


def test_what_a_rejected_draft_met_ends_no_later_run(weights: Weights) -> None:
    """It is noted on the device, and nobody has looked when the draft is taken back."""
    engine = engine_of(weights)
    answer = list(engine.generate(PROMPT, 5, GREEDY, frozenset()))
    engine.state.nan_1.fill_(1)
    more = [*PROMPT, *answer]
    found = list(engine.generate(more, 5, GREEDY, frozenset(), reuse=True))
    assert engine.last_run is not None
    assert engine.last_run.reused_tokens > 0
    assert found == list(engine_of(weights).generate(more, 5, GREEDY, frozenset()))
