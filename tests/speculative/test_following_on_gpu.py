"""Generation with drafts and the CUDA ops: the text of no drafts, and ends inside a block; eagerly
and by both kinds of graphs.

Models as small as these give a token the same bits in steps of every length.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.parallel import head_shares
from dsv4.speculative.recorded_steps import DraftedRecordedSteps
from dsv4.weights.parameters import MtpKind
from tests.speculative.on_gpu import (
    KINDS,
    MODES,
    VOCABULARY,
    engine_on_gpu,
    recorded_drafts,
    steps_of,
    told_text,
)
from tests.speculative.scripted import GREEDY, NO_STOPS, assert_tokens_are_noted
from tests.speculative.test_drafts_on_gpu import ids_of

pytestmark = pytest.mark.gpu

Mode = Any


@pytest.fixture(scope="module", params=[(kind, mode) for kind in KINDS for mode in MODES])
def drafted(request: pytest.FixtureRequest) -> tuple[MtpKind, Engine]:
    kind, mode = request.param
    return kind, engine_on_gpu(kind, cuda_graph=mode)


@pytest.fixture(scope="module")
def plain() -> dict[MtpKind, Engine]:
    return {kind: engine_on_gpu(kind, drafted=False) for kind in KINDS}


def test_greedy_text_is_that_without_drafts(
    drafted: tuple[MtpKind, Engine], plain: dict[MtpKind, Engine]
) -> None:
    kind, engine = drafted
    for seed, prompt in enumerate((1, 13, 40)):
        ids = ids_of(prompt, seed)
        text = list(engine.generate(ids, 48, GREEDY, NO_STOPS))
        assert len(text) == 48
        assert text == list(plain[kind].generate(ids, 48, GREEDY, NO_STOPS))
        assert engine.last_run is not None
        assert engine.last_run.drafts is not None
        assert engine.last_run.drafts.tokens == 47
        assert engine.position == prompt + 47


@pytest.mark.parametrize("pattern", [0, 2, 7, "mixed"])
def test_any_number_of_kept_drafts_gives_the_same_text(
    drafted: tuple[MtpKind, Engine], plain: dict[MtpKind, Engine], pattern: int | str
) -> None:
    kind, engine = drafted
    ids = ids_of(13)
    text = list(plain[kind].generate(ids, 60, GREEDY, NO_STOPS))
    places = range(13 + 60)
    wrong = [int(place * 7 % 5 < 2) if pattern == "mixed" else 0 for place in places]
    if isinstance(pattern, int) and pattern < 7:
        wrong = [int(place % (pattern + 1) == 0) for place in places]
    found = told_text(engine, ids, [*ids, *text], wrong, 60, GREEDY)
    assert found == text
    stats = steps_of(engine).drafted.stats()
    assert stats.tokens == 59
    if pattern == 7:
        most = steps_of(engine).count.now
        assert stats.acceptance[:most] == (1.0,) * most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_drafts_that_do_not_pay_rest_and_the_text_is_the_same(
    kind: MtpKind, mode: Mode, plain: dict[MtpKind, Engine]
) -> None:
    engine = engine_on_gpu(kind, cuda_graph=mode, draft="auto")
    ids = ids_of(13)
    text = list(plain[kind].generate(ids, 400, GREEDY, NO_STOPS))
    for _ in range(2):
        assert told_text(engine, ids, [*ids, *text], [1] * 413, 400, GREEDY) == text
        stats = steps_of(engine).drafted.stats()
        assert (stats.tokens, stats.steps) == (399, 399)
        assert 0 < stats.drafted[0] < 40
        assert stats.accepted[0] == 0


@pytest.mark.parametrize("taken", [1, 2, 6, 7, 8])
def test_a_caller_that_leaves_inside_a_block_leaves_the_tokens_it_took(
    drafted: tuple[MtpKind, Engine], taken: int
) -> None:
    _, engine = drafted
    ids = ids_of(13)
    text = list(engine.generate(ids, 20, GREEDY, NO_STOPS))
    run = engine.generate(ids, 20, GREEDY, NO_STOPS)
    assert [next(run) for _ in range(taken)] == text[:taken]
    run.close()
    assert engine.token_ids == [*ids, *text[: taken - 1]]
    for device, position_1 in engine.state.positions_1.items():
        assert int(position_1) == engine.position
        assert int(engine.state.rejected_1[device]) == 0
    assert int(engine.decode([text[taken - 1]])[0].argmax()) == text[taken]


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_stop_token_ends_inside_a_block(drafted: tuple[MtpKind, Engine], stop: int) -> None:
    _, engine = drafted
    ids = ids_of(13)
    text = list(engine.generate(ids, 20, GREEDY, NO_STOPS))
    first = text.index(text[stop])
    assert list(engine.generate(ids, 20, GREEDY, [text[stop]])) == text[:first]
    assert engine.last_run is not None
    assert (engine.last_run.finish_reason, engine.position) == ("stop", 13 + first)


@pytest.mark.parametrize("limit", [1, 2, 6, 7, 12])
def test_the_limit_ends_inside_a_block(drafted: tuple[MtpKind, Engine], limit: int) -> None:
    _, engine = drafted
    ids = ids_of(13)
    assert len(list(engine.generate(ids, limit, GREEDY, NO_STOPS))) == limit
    assert engine.position == 13 + limit - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_context_ends_inside_a_block(kind: MtpKind, mode: Mode) -> None:
    engine = engine_on_gpu(kind, max_context=24, prefill_chunk=16, cuda_graph=mode)
    assert len(list(engine.generate(ids_of(13), 50, GREEDY, NO_STOPS))) == 12
    assert engine.last_run is not None
    assert (engine.last_run.finish_reason, engine.position) == ("context", 24)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_is_that_of_its_seed_in_every_mode(kind: MtpKind) -> None:
    ids = ids_of(9)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
    texts = []
    for mode in MODES:
        engine = engine_on_gpu(kind, cuda_graph=mode)
        texts += [list(engine.generate(ids, 60, sampling, NO_STOPS)) for _ in range(2)]
    assert texts.count(texts[0]) == len(texts)
    other = SamplingParams(temperature=0.9, top_p=0.95, seed=4)
    assert list(engine.generate(ids, 60, other, NO_STOPS)) != texts[0]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "sampled"])
def test_every_token_is_noted_with_its_log_probability(sampling: SamplingParams) -> None:
    assert_tokens_are_noted(engine_on_gpu("dspark"), ids_of(13), sampling, 0.1)


def test_nan_that_a_draft_brings_is_not_the_text_s() -> None:
    """One token's embedding is NaN: no run chooses it, drafts do."""
    engine = engine_on_gpu("dspark")
    ids = ids_of(13)
    text = list(engine.generate(ids, 24, GREEDY, NO_STOPS))
    bad = next(token for token in range(VOCABULARY) if token not in [*ids, *text])
    engine.model.embed.table_VE[bad] = torch.nan
    told = [*ids, *text]
    wrong = [(bad - told[place]) * int(place % 4 == 3) for place in range(len(told))]
    found = told_text(engine, ids, told, wrong, 24, GREEDY)
    assert found == text


def test_drafts_end_where_their_logits_are_nan() -> None:
    engine = engine_on_gpu("dspark")
    ids = ids_of(13)
    module = steps_of(engine).along.module
    module.module.markov_w1_VR[:] = torch.nan  # pyright: ignore[reportAttributeAccessIssue]
    text = list(engine.generate(ids, 12, GREEDY, NO_STOPS))
    plain = engine_on_gpu("dspark", drafted=False)
    assert text == list(plain.generate(ids, 12, GREEDY, NO_STOPS))
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.drafted == ()
    assert recorded_drafts(engine, 5, 3)[0] == [-1, -1, -1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_two_gpus_give_the_text_of_one(
    kind: MtpKind, mode: Mode, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both multiply the head of the model and of its drafts."""
    ids = ids_of(13)
    if is_shared:
        monkeypatch.setattr(head_shares, "HEAD_START_BYTES", 0)
    engine = engine_on_gpu(kind, gpus=2, cuda_graph=mode)
    one = engine_on_gpu(kind)
    if is_shared:
        expected, logits_NV = recorded_drafts_behind(one, ids)
        found, shared_NV = recorded_drafts_behind(engine, ids)
        assert found == expected
        bound = 64 * 2.0**-24 * float(logits_NV.abs().max())
        assert torch.allclose(shared_NV, logits_NV, rtol=0, atol=bound)
        shared = steps_of(engine).draft_step(3).recorded
        assert shared.channel_uses == (1 if kind == "dspark" else 3)
    for sampling in (GREEDY, SamplingParams(seed=5)):
        expected = list(one.generate(ids, 60, sampling, NO_STOPS))
        assert list(engine.generate(ids, 60, sampling, NO_STOPS)) == expected
    assert isinstance(engine.steps, DraftedRecordedSteps)


def recorded_drafts_behind(engine: Engine, ids: list[int]) -> tuple[list[int], Tensor]:
    """Three drafts behind a prompt and its last token, with their logits on the host."""
    engine.reset()
    engine.prefill(ids)
    if engine.state.channels is not None:
        for channel in engine.state.channels.all:
            channel.words_W.fill_(-1)
    tokens, logits_NV = recorded_drafts(engine, ids[-1], 3)
    return tokens, logits_NV.cpu()
