"""Drafts of ranks on two GPUs: the text of ranks on one stream, eagerly and by graphs."""

from typing import Any

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.demo import DRAFTS
from tests.decode.demo import GREEDY, PROMPTS
from tests.ranks.on_gpu import different_caches, one_stream, two_gpus
from tests.ranks.test_drafted_ranks_cuda import NO_STOPS, SAMPLED, assert_ranks_alike, steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
MODES = (None, "split", "full")


@pytest.fixture(scope="module", params=DRAFTS)
def texts(request: pytest.FixtureRequest) -> tuple[str, dict[Any, list[int]]]:
    """Of ranks on one stream, greedy and sampled."""
    engine = one_stream(request.param, prefill_chunk=2048)
    found = {
        (name, sampling): list(engine.generate(prompt, 60, sampling, NO_STOPS))
        for name, prompt in PROMPTS.items()
        for sampling in (GREEDY, SAMPLED)
    }
    return request.param, found


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_text_of_one_stream(
    mode: Any, texts: tuple[str, dict[Any, list[int]]]
) -> None:
    name, expected = texts
    engine = two_gpus(name, cuda_graph=mode)
    for (prompt, sampling), text in expected.items():
        assert list(engine.generate(PROMPTS[prompt], 60, sampling, NO_STOPS)) == text
        assert_ranks_alike(engine)
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.tokens > engine.last_run.drafts.steps
    assert_stops_leave_ranks_side_by_side(engine)


def assert_stops_leave_ranks_side_by_side(engine: Engine) -> None:
    prompt = PROMPTS["stories"]
    expected = list(engine.generate(prompt, 30, GREEDY, NO_STOPS))
    for count in (1, 3, 7):
        tokens = engine.generate(prompt, 30, GREEDY, NO_STOPS)
        assert [next(tokens) for _ in range(count)] == expected[:count]
        tokens.close()
        assert different_caches(engine, engine) == []
    assert list(engine.generate(prompt, 30, GREEDY, NO_STOPS)) == expected


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_that_do_not_pay_rest_and_the_text_is_the_same(name: str) -> None:
    """Drafts of a module whose last norm is zero are all token 0, which texts hardly have, or what
    DSpark's Markov head makes of the token before.
    """
    prompt = PROMPTS["stories"]
    text = list(two_gpus(cuda_graph="full").generate(prompt, 400, GREEDY, NO_STOPS))
    assert text.count(0) < 4
    folder = str(DRAFTS[name])
    engine = two_gpus(cuda_graph="full", draft_weights=folder)
    assert engine.engine_config.draft == "auto"
    for module in engine.draft_modules:
        module.head.norm.zero_()
    for _ in range(2):
        assert list(engine.generate(prompt, 400, GREEDY, NO_STOPS)) == text
        assert_ranks_alike(engine)
        assert engine.last_run is not None
        drafts = engine.last_run.drafts
        assert drafts is not None
        assert drafts.tokens == 399
        assert 0 < drafts.drafted[0] < 60
        assert drafts.accepted[0] < drafts.drafted[0] / 2
    assert_stops_leave_ranks_side_by_side(engine)


def test_ranks_that_accept_other_tokens_are_noticed() -> None:
    """The seed of one rank changes while it runs."""
    engine = two_gpus("mtp")
    prompt = PROMPTS["stories"]
    expected = list(engine.generate(prompt, 12, GREEDY, NO_STOPS))
    random = SamplingParams(temperature=2.0, seed=3)
    tokens = engine.generate(prompt, 200, random, NO_STOPS)
    for _ in range(2):
        next(tokens)
    steps_of(engine).ranks[1].sampler.seed_1.fill_(99)
    with pytest.raises(
        RuntimeError, match=r"^ranks: found (no )?token( \d+)? of rank 1 at position \d+, "
    ):
        list(tokens)
    assert list(engine.generate(prompt, 12, GREEDY, NO_STOPS)) == expected
