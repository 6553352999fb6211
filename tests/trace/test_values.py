"""The values of a trace, each against what the definition says it is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams, UserError
from dsv4.config import CSA_RATIO
from dsv4.layers.values import INDEXER, SEAM, Watch, completed_rows, value_names
from dsv4.ops.hyper_connection import hc_post
from dsv4.ops.rope import rope
from dsv4.trace.steps import ShownValues
from tests.model.tiny import random_ids, small_config, tiny_engine

TOKENS = 58
IDS = random_ids(TOKENS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64, prefill_chunk=16)


@pytest.fixture(scope="module")
def values(engine: Engine) -> dict[str, Tensor]:
    return engine.trace(IDS)


def test_every_named_value_is_there_with_its_documented_shape(
    engine: Engine, values: dict[str, Tensor]
) -> None:
    config = engine.config
    assert set(values) == {*value_names(config), "positions", "token_ids"}
    widths = {
        "streams": (config.hc_mult, config.hidden_size),
        "x": (config.hidden_size,),
        "post": (config.hc_mult,),
        "comb": (config.hc_mult, config.hc_mult),
        "attn.q": (config.num_attention_heads, config.head_dim),
        "attn.kv": (config.head_dim,),
        "attn.compressed": (config.head_dim,),
        "indexer.q": (config.index_n_heads, config.index_head_dim),
        "indexer.keys": (config.index_head_dim,),
        "attn.heads": (config.num_attention_heads, config.head_dim),
        "output": (config.hidden_size,),
        "router.experts": (config.num_experts_per_tok,),
        "router.weights": (config.num_experts_per_tok,),
        "hidden": (config.hidden_size,),
        "logits": (config.vocab_size,),
    }
    for name, rows in values.items():
        part = ".".join(name.split(".")[2:])
        width = widths.get(part) or widths.get(part.rpartition(".")[2]) or widths.get(name)
        if width is not None:
            assert tuple(rows.shape[1:]) == width, name
        is_compressed = part in ("attn.compressed", "indexer.keys")
        ratio = config.compress_ratios[int(name.split(".")[1])] if is_compressed else 1
        assert rows.shape[0] == TOKENS // ratio, name


def test_the_order_of_names_is_that_of_the_computation(engine: Engine) -> None:
    seen: list[str] = []
    engine.run_traced(IDS[:5], Watch(lambda name, rows: seen.append(name)))
    assert seen == [*value_names(engine.config), "positions", "token_ids"]


def test_who_writes_to_what_is_shown_changes_nothing(
    engine: Engine, values: dict[str, Tensor]
) -> None:
    shown = ShownValues()

    def see(name: str, rows: Tensor) -> None:
        shown.add(name, rows.clone())
        rows.zero_()

    engine.run_traced(IDS, Watch(see))
    for name, rows in shown.joined().items():
        assert torch.equal(rows, values[name]), name


@pytest.mark.slow
def test_values_do_not_depend_on_how_the_tokens_are_fed(
    engine: Engine, values: dict[str, Tensor]
) -> None:
    """Chunks of 16 and 11, one chunk and single tokens complete the same compressed rows."""
    one_by_one = engine.trace(IDS, prompt_tokens=0)
    mixed = engine.trace(IDS, prompt_tokens=13)
    for name, rows in values.items():
        for other in (one_by_one[name], mixed[name]):
            assert other.shape == rows.shape, name
            if rows.is_floating_point():
                torch.testing.assert_close(other, rows, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(other, rows), name


def test_seams_mix_the_results_into_the_streams(engine: Engine, values: dict[str, Tensor]) -> None:
    """post and comb of a seam, with the sublayer's result, give the streams of the next one."""
    for layer in range(engine.config.num_hidden_layers):
        at = f"layers.{layer}"
        for seam, output, after in (
            ("attn_hc", "attn.output", f"{at}.ffn_hc.streams"),
            ("ffn_hc", "ffn.output", f"{at}.streams"),
        ):
            streams, post, comb, _ = (values[f"{at}.{seam}.{part}"] for part in SEAM)
            mixed = hc_post(values[f"{at}.{output}"], streams, post, comb)
            torch.testing.assert_close(values[after], mixed, rtol=1e-5, atol=1e-5)
        if layer:
            before = values[f"layers.{layer - 1}.streams"]
            assert torch.equal(values[f"{at}.attn_hc.streams"], before)


def test_scores_order_the_chosen_entries_before_the_others(
    engine: Engine, values: dict[str, Tensor]
) -> None:
    """All scores come of the traced queries, weights and keys; no other entry is better."""
    config = engine.config
    visible_T = (torch.arange(TOKENS) + 1) // CSA_RATIO
    assert int((visible_T > config.index_topk).sum()) > 3, "some tokens have to choose"
    for layer in (at for at, ratio in enumerate(config.compress_ratios) if ratio == CSA_RATIO):
        q, weights, keys, scores_TK, entries_TK = (
            values[f"layers.{layer}.indexer.{part}"] for part in INDEXER
        )
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        exact_TS = (torch.relu(q.double() @ keys.double().T) * weights[..., None]).sum(1) * scale
        for token, visible in enumerate(visible_T.tolist()):
            chosen = entries_TK[token][entries_TK[token] >= 0]
            best = exact_TS[token, :visible].topk(min(visible, config.index_topk)).indices
            assert chosen.tolist() == sorted(best.tolist())
            found = scores_TK[token, : len(chosen)].double()
            torch.testing.assert_close(found, exact_TS[token, chosen], rtol=1e-4, atol=1e-5)
            assert bool((scores_TK[token, len(chosen) :] == -torch.inf).all())


def test_heads_attend_to_the_rows_of_their_window() -> None:
    """In a layer without compressed entries, whose ring is shorter than the sequence."""
    window = 8
    raw = small_config((0,), sliding_window=window)
    engine = tiny_engine(raw, max_context=64, prefill_chunk=8)
    found = engine.trace(IDS, at=["layers.0.attn.*"], prompt_tokens=50)
    q_THD, kv_TD, heads_THD = (found[f"layers.0.attn.{part}"] for part in ("q", "kv", "heads"))
    attn = engine.model.blocks[0].attn
    back_TT = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    logits_THT = q_THD @ kv_TD.T * engine.config.head_dim**-0.5
    logits_THT[((back_TT < 0) | (back_TT >= window))[:, None].expand_as(logits_THT)] = -torch.inf
    sink_TH1 = attn.sink_H[:, None].expand(TOKENS, -1, 1)
    weights_THT = torch.cat([logits_THT, sink_TH1], -1).softmax(-1)[..., :-1]
    expected = rope(weights_THT @ kv_TD, found["positions"], attn.norm.inv_freq, inverse=True)
    torch.testing.assert_close(heads_THD, expected, rtol=1e-4, atol=1e-5)


def test_patterns_choose_values(engine: Engine, values: dict[str, Tensor]) -> None:
    found = engine.trace(IDS, at=["layers.1.attn.*", "hidden"])
    expected = [name for name in values if name.startswith("layers.1.attn.") or name == "hidden"]
    assert list(found) == [*expected, "positions", "token_ids"]
    for name, rows in found.items():
        assert torch.equal(rows, values[name]), name


def test_a_pattern_without_a_value_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match=r"at: 'layer\.3' matches no value"):
        engine.trace(IDS, at=["hidden", "layer.3"])


@pytest.mark.parametrize("at", [[], "hidden", 5, ["hidden", 5]])
def test_what_is_no_list_of_patterns_is_refused(engine: Engine, at: Any) -> None:
    with pytest.raises(UserError, match="^at: found .*, expected at least one pattern in a list"):
        engine.trace(IDS, at=at)


@pytest.mark.parametrize("prompt_tokens", [-1, len(IDS) + 1])
def test_there_are_not_more_prompt_tokens_than_tokens(engine: Engine, prompt_tokens: int) -> None:
    expected = f"prompt_tokens: found {prompt_tokens}, expected an integer from 0 to {len(IDS)}"
    with pytest.raises(UserError, match=expected):
        engine.trace(IDS, prompt_tokens=prompt_tokens)


@pytest.mark.parametrize("prompt_tokens", [0, 3, 7, 10, 11])
def test_a_trace_may_fill_the_context(prompt_tokens: int) -> None:
    """The caches have a slot for the entry that is open at its end, and none behind."""
    engine = tiny_engine(max_context=11)
    found = engine.trace(random_ids(11), ["*.attn.compressed", "*.indexer.keys"], prompt_tokens)
    ratios = [ratio for ratio in engine.config.compress_ratios if ratio]
    rows = [found[name].shape[0] for name in found if name.endswith("compressed")]
    assert rows == [11 // ratio for ratio in ratios]


def test_a_trace_does_not_change_what_follows(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0)
    before = list(engine.generate(IDS, 6, greedy, stop_token_ids=()))
    engine.trace(IDS)
    assert engine.position == TOKENS
    assert list(engine.generate(IDS, 6, greedy, stop_token_ids=())) == before


def test_completed_rows_add_up() -> None:
    for ratio in (1, 4, 128):
        steps = [(0, 7), (7, 1), (8, 256), (264, 3)]
        assert sum(completed_rows(*step, ratio) for step in steps) == 267 // ratio


def test_a_watched_generation_shows_what_a_trace_of_its_tokens_does(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0)
    expected = list(engine.generate(IDS, 5, greedy, stop_token_ids=()))
    shown = ShownValues()
    watch = Watch(shown.add)
    found = list(engine.generate(IDS, 5, greedy, stop_token_ids=(), watch=watch))
    assert found == expected
    values = shown.joined()
    traced = engine.trace([*IDS, *found[:-1]], prompt_tokens=TOKENS)
    assert values.keys() == traced.keys()
    for name, rows in values.items():
        assert torch.equal(rows, traced[name]), name


def test_a_watch_that_is_none_is_refused_when_it_is_given(engine: Engine) -> None:
    with pytest.raises(UserError, match="^watch: found 'x', expected a Watch or None$"):
        engine.generate(IDS, 5, watch="x")  # type: ignore[arg-type]
