"""Drafts of simulated ranks: every rank drafts with its parts of the module, and all accept the
same tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.opened_draft import FLAG_OF_KIND
from dsv4.ops import TORCH, Ops
from dsv4.parallel.placement import Placement
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import CPU, direct, random_ids
from tests.ranks.cut_weights import rank_weights
from tests.ranks.exact import EXACT
from tests.ranks.simulated import SETTINGS, different_caches
from tests.speculative.models import KINDS, assert_near, drafted_config, drafted_weights
from tests.speculative.scripted import GREEDY, NO_STOPS, Script, scripted

GEOMETRY: dict[str, Any] = {"num_attention_heads": 8, "o_groups": 4}
SAMPLED = SamplingParams(temperature=0.8, seed=5)


def drafted_ranks(
    kind: MtpKind, ranks: int, ops: Ops = TORCH, drafted: bool = True, **settings: Any
) -> Engine:
    """An engine of ``ranks`` ranks with the parts of the same (random) model and module."""
    config = drafted_config(kind, **GEOMETRY)
    whole: Any = drafted_weights(config, kind)
    if not drafted:
        whole = {name: whole[name] for name in whole if not name.startswith("mtp.")}
        config = replace(config, dspark=None)
    parts = [rank_weights(whole, config, ranks, rank) for rank in range(ranks)]
    placement = Placement.tensor(config.num_hidden_layers, (CPU,) * ranks)
    # "auto" drafts where it is faster.
    named = {"draft": FLAG_OF_KIND[kind]} if drafted else {}
    engine = EngineConfig(**{**SETTINGS, **named, **settings})
    return Engine(config, engine, parts, placement, direct(ops))


def steps_of(engine: Engine) -> DraftedSteps:
    assert isinstance(engine.steps, DraftedSteps)
    return engine.steps


def assert_modules_alike(engine: Engine) -> None:
    """What the module keeps has the same bits on every rank."""
    first, *others = (rank.draft for rank in engine.state.ranks)
    assert first is not None
    for other in others:
        assert other is not None
        for one, expected in zip(other.tensors(), first.tensors(), strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_without_drafts(kind: MtpKind, ranks: int) -> None:
    plain = drafted_ranks(kind, ranks, drafted=False)
    engine = drafted_ranks(kind, ranks)
    for prompt in (1, 40):
        ids = random_ids(prompt)
        text = list(plain.generate(ids, 9, GREEDY, NO_STOPS))
        assert list(engine.generate(ids, 9, GREEDY, NO_STOPS)) == text
        assert engine.last_run is not None
        assert engine.last_run.drafts is not None
        assert engine.last_run.drafts.tokens == 8
        assert different_caches(engine, engine) == []
        assert_modules_alike(engine)


@pytest.mark.parametrize("kept", [0, 2, 5, "mixed"])
def test_any_number_of_kept_drafts_gives_the_same_text(kept: int | str) -> None:
    ids = random_ids(13)
    text = list(drafted_ranks("dspark", 2, drafted=False).generate(ids, 19, GREEDY, NO_STOPS))
    numbers = {"mixed": lambda position: position * 7 % 6}.get(str(kept), lambda position: kept)
    engine = scripted(drafted_ranks("dspark", 2), Script([*ids, *text], numbers))
    assert list(engine.generate(ids, 19, GREEDY, NO_STOPS)) == text
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    if isinstance(kept, int):
        assert engine.last_run.drafts.steps == 18 // (kept + 1)
    assert different_caches(engine, engine) == []
    assert_modules_alike(engine)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_exact_sums_tokens_and_drafts_are_those_of_a_lone_rank(
    kind: MtpKind, sampling: SamplingParams
) -> None:
    """Wrong cuts of a module change its drafts, and with them how many are kept."""
    ids = random_ids(40)
    lone, several = (drafted_ranks(kind, ranks, EXACT) for ranks in (1, 4))
    expected = list(lone.generate(ids, 16, sampling, NO_STOPS))
    assert list(several.generate(ids, 16, sampling, NO_STOPS)) == expected
    found, wanted = (steps_of(engine).drafted.stats() for engine in (several, lone))
    assert (found.steps, found.drafted, found.accepted) == (
        wanted.steps,
        wanted.drafted,
        wanted.accepted,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_draft_logits_are_those_of_a_lone_rank(kind: MtpKind) -> None:
    """Behind prompts around the borders of the window and of windows of a compressor."""
    lone, several = (drafted_ranks(kind, ranks) for ranks in (1, 4))
    for position in (1, 15, 16, 17, 33):
        ids = random_ids(position + 1)
        logits = []
        for engine in (lone, several):
            engine.reset()
            engine.prefill(ids[:-1])
            logits.append(proposed(engine, ids[-1], 4))
        assert_near(logits[1], logits[0])


@torch.inference_mode()
def proposed(engine: Engine, token: int, count: int) -> torch.Tensor:
    def choose(logits_V: torch.Tensor, position: int) -> torch.Tensor:
        return torch.tensor(position % 89)

    drafter = steps_of(engine).drafter
    return drafter.propose(token, engine.position, count, choose).logits_NV


def test_a_caller_that_leaves_inside_a_block_leaves_the_ranks_side_by_side() -> None:
    ids = random_ids(13)
    text = list(drafted_ranks("dspark", 2, drafted=False).generate(ids, 20, GREEDY, NO_STOPS))
    engine = scripted(drafted_ranks("dspark", 2), Script([*ids, *text], lambda _: 5))
    run = engine.generate(ids, 20, GREEDY, NO_STOPS)
    assert [next(run) for _ in range(4)] == text[:4]
    run.close()
    assert engine.token_ids == [*ids, *text[:3]]
    assert different_caches(engine, engine) == []
    follow = [*ids, *text[:4]]
    assert list(engine.generate(follow, 5, GREEDY, NO_STOPS, reuse=True)) == text[4:9]


def test_drafts_end_where_their_logits_are_nan() -> None:
    engine = drafted_ranks("dspark", 2)
    for module in engine.draft_modules:
        module.markov_w1_VR[:] = torch.nan  # pyright: ignore[reportAttributeAccessIssue]
    ids = random_ids(13)
    text = list(drafted_ranks("dspark", 2, drafted=False).generate(ids, 12, GREEDY, NO_STOPS))
    assert list(engine.generate(ids, 12, GREEDY, NO_STOPS)) == text
    assert steps_of(engine).drafted.stats().drafted == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_has_the_rows_of_every_rank_s_module(kind: MtpKind, tmp_path: Path) -> None:
    """Drafts behind it are those of its writer, whose number of ranks does not matter."""
    ids = random_ids(41)
    writer = drafted_ranks(kind, 2)
    writer.prefill(ids[:-1])
    writer.save_state(tmp_path / "state")
    expected = proposed(writer, ids[-1], 3)
    for ranks in (2, 1):
        reader = drafted_ranks(kind, ranks)
        reader.prefill(random_ids(30, seed=4))
        reader.load_state(tmp_path / "state")
        assert_near(proposed(reader, ids[-1], 3), expected)
        assert reader.state.draft is not None
        assert reader.state.draft.covers(reader.position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_point_has_the_rows_of_every_rank_s_module(kind: MtpKind) -> None:
    ids = random_ids(40)
    others = random_ids(60, seed=1)
    engine = drafted_ranks(kind, 2)
    engine.prefill(ids)
    engine.state.keep_point()
    engine.prefill(others)
    engine.rewind_to(len(ids))
    assert_modules_alike(engine)
    straight = drafted_ranks(kind, 2)
    straight.prefill(ids)
    texts = [
        list(of.generate([*ids, *others[:3]], 9, SAMPLED, NO_STOPS, reuse=True))
        for of in (engine, straight)
    ]
    assert texts[0] == texts[1]
    assert_modules_alike(engine)
