"""Generation with drafts: the text of no drafts, ends inside a block, and no trace of what was
rejected.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.layers.values import Watch
from dsv4.speculative.drafter import Proposal
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, drafted_engine, plain_engine
from tests.speculative.scripted import (
    GREEDY,
    NO_STOPS,
    Script,
    assert_tokens_are_noted,
    plain_text,
    scripted,
)

NAN_TOKEN_ID = 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [1, 40])
def test_spec11_f43_greedy_text_is_that_without_drafts(kind: MtpKind, prompt: int) -> None:
    ids = random_ids(prompt)
    engine = drafted_engine(kind)
    assert list(engine.generate(ids, 18, GREEDY, NO_STOPS)) == plain_text(kind, ids, 18)
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.tokens == 17


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 2, 5, "mixed"])
def test_spec11_j94_any_number_of_accepted_drafts_gives_the_same_text(kept: int | str) -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 37)
    numbers = {"mixed": lambda position: position * 7 % 6}.get(str(kept), lambda position: kept)
    engine = scripted(drafted_engine("dspark"), Script([*ids, *text], numbers))
    assert list(engine.generate(ids, 37, GREEDY, NO_STOPS)) == text
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    stats = engine.last_run.drafts
    if isinstance(kept, int):
        assert stats.steps == 36 // (kept + 1)
        assert list(stats.acceptance[:kept]) == [1.0] * kept
        assert list(stats.acceptance[kept:]) == [0.0] * (len(stats.drafted) - kept)


@pytest.mark.parametrize("limit", [1, 2, 6, 7, 12])
def test_the_limit_ends_inside_a_block(limit: int) -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 20)
    engine = scripted(drafted_engine("dspark"), Script([*ids, *text], lambda _: 5))
    assert list(engine.generate(ids, limit, GREEDY, NO_STOPS)) == text[:limit]
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "length"
    assert engine.position == 13 + limit - 1
    assert engine.token_ids == [*ids, *text[: limit - 1]]


def test_the_context_ends_inside_a_block() -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 20)
    engine = drafted_engine("dspark", max_context=20)
    engine = scripted(engine, Script([*ids, *text], lambda _: 5))
    assert list(engine.generate(ids, 50, GREEDY, NO_STOPS)) == text[:8]
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "context"
    assert engine.state.furthest == 20


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_stop_token_ends_inside_a_block(stop: int) -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 20)
    first = text.index(text[stop])
    engine = scripted(drafted_engine("dspark"), Script([*ids, *text], lambda _: 5))
    found = list(engine.generate(ids, 20, GREEDY, [text[stop]]))
    assert found == text[:first]
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "stop"
    # The stop token itself is not appended, as without drafts.
    assert engine.position == 13 + first
    assert torch.equal(
        engine.decode([7]).argmax(-1), go_on(plain_engine("dspark"), [*ids, *text[:first]], 7)
    )


def go_on(engine: Engine, ids: list[int], token: int) -> Tensor:
    engine.prefill(ids)
    return engine.decode([token]).argmax(-1)


@pytest.mark.parametrize("taken", [1, 2, 6, 7, 8])
def test_a_caller_that_leaves_inside_a_block_leaves_the_tokens_it_took(taken: int) -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 20)
    engine = scripted(drafted_engine("dspark"), Script([*ids, *text], lambda _: 5))
    run = engine.generate(ids, 20, GREEDY, NO_STOPS)
    assert [next(run) for _ in range(taken)] == text[:taken]
    run.close()
    assert engine.token_ids == [*ids, *text[: taken - 1]]
    assert (
        list(engine.generate([*ids, *text[:taken]], 5, GREEDY, NO_STOPS, reuse=True))
        == (text[taken : taken + 5])
    )


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "fp8", "compute_dtype": "bfloat16"}])
def test_tokens_and_log_probabilities_are_those_without_drafts(settings: dict[str, Any]) -> None:
    """Bit for bit: where a step of several tokens differs from steps of one, most chosen tokens
    are the same, but their log-probabilities are not. Past the first entry of every kind of cache.
    """
    noted = SamplingParams(temperature=0, logprobs=2)
    ids = random_ids(13)
    plain = plain_engine("dspark", **settings)
    text = list(plain.generate(ids, 200, noted, NO_STOPS))
    script = Script([*ids, *text], lambda position: position * 7 % 6)
    engine = scripted(drafted_engine("dspark", **settings), script)
    assert list(engine.generate(ids, 200, noted, NO_STOPS)) == text
    assert plain.last_run is not None
    assert engine.last_run is not None
    assert engine.last_run.logprobs == plain.last_run.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_with_a_seed_is_repeated_and_another_seed_is_another_text(kind: MtpKind) -> None:
    engine = drafted_engine(kind)
    texts = [
        list(engine.generate(random_ids(9), 16, SamplingParams(seed=seed), NO_STOPS))
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_measured_number_of_drafts_gives_the_same_text() -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 40)
    engine = drafted_engine("dspark", draft_tokens="auto")
    script = Script([*ids, *text], lambda position: position * 5 % 6)
    assert list(scripted(engine, script).generate(ids, 40, GREEDY, NO_STOPS)) == text


def test_a_seed_repeats_its_text_where_drafts_have_to_pay() -> None:
    ids = random_ids(13)
    sampling = SamplingParams(temperature=0.9, seed=3)
    used = drafted_engine("dspark", draft="auto")
    # By what this one measures, drafts do not pay.
    list(used.generate(ids, 16, GREEDY, NO_STOPS))
    fresh = drafted_engine("dspark", draft="auto")
    texts = [list(engine.generate(ids, 16, sampling, NO_STOPS)) for engine in (used, fresh)]
    assert texts[0] == texts[1]
    assert used.last_run is not None
    assert used.last_run.drafts is not None
    assert used.last_run.drafts.drafted


def test_a_run_that_is_watched_makes_no_drafts() -> None:
    ids = random_ids(13)
    engine = drafted_engine("dspark")
    list(engine.generate(ids, 6, GREEDY, NO_STOPS))
    watch = Watch(lambda name, rows: None, lambda name: name == "hidden")
    watched = list(engine.generate(ids, 6, GREEDY, NO_STOPS, watch=watch))
    assert watched == plain_text("dspark", ids, 6)
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.steps == 0


def test_drafts_end_where_the_context_has_no_room_for_all_of_them() -> None:
    engine = drafted_engine("classic", draft_tokens=4, max_context=32)
    text = plain_text("classic", random_ids(20), 13, max_context=32)
    scripted(engine, Script([*random_ids(20), *text], lambda _: 0))
    assert list(engine.generate(random_ids(20), 100, GREEDY, NO_STOPS)) == text
    assert (engine.position, engine.state.furthest) == (32, 32)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "sampled"])
def test_every_token_is_noted_with_its_log_probability(sampling: SamplingParams) -> None:
    assert_tokens_are_noted(drafted_engine("dspark"), random_ids(13), sampling, 1e-3)


@pytest.mark.slow
def test_hardly_any_accepted_draft_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = random_ids(13)
    text = plain_text("classic", ids, 35)
    engine = scripted(drafted_engine("classic"), Script([*ids, *text], lambda _: 0))
    for _ in range(2):
        list(engine.generate(ids, 35, GREEDY, NO_STOPS))
    (record,) = caplog.records
    assert "0 of 34 first drafts were accepted, expected 20 % or more" in record.message


@pytest.mark.slow
def test_spec11_f40_nan_that_a_draft_brings_is_not_the_text_s() -> None:
    """One token's embedding is NaN: no run chooses it, drafts do."""
    ids = [token for token in random_ids(13) if token != NAN_TOKEN_ID]
    text = plain_text("dspark", ids, 24)
    assert NAN_TOKEN_ID not in text
    engine = drafted_engine("dspark")
    table_VE = engine.model.embed.table_VE.clone()
    table_VE[NAN_TOKEN_ID] = torch.nan
    embed = replace(engine.model.embed, table_VE=table_VE)
    model = replace(engine.model, embed=embed)
    engine.steps.models = (model,)  # pyright: ignore[reportAttributeAccessIssue]
    script = Script([*ids, *text], lambda _: 2)
    steps = scripted(engine, script).steps
    assert isinstance(steps, DraftedSteps)
    steps.drafter.propose = lambda token, position, count, choose: Proposal(
        [*script(position, count)[:2], NAN_TOKEN_ID][:count], torch.zeros((count, 89))
    )
    assert list(engine.generate(ids, 24, GREEDY, NO_STOPS)) == text
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_spec11_f40_drafts_end_where_their_logits_are_nan(kind: MtpKind) -> None:
    engine = drafted_engine(kind)
    engine.draft_modules[0].head.norm[:] = torch.nan
    ids = random_ids(13)
    assert list(engine.generate(ids, 12, GREEDY, NO_STOPS)) == plain_text(kind, ids, 12)
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.drafted == ()
