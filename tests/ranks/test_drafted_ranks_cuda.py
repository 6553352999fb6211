"""Both ranks of the demo with its draft modules on one stream of one GPU: every rank drafts with
its parts, keeps the same bits and accepts the same tokens.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.demo import DRAFTS
from dsv4.speculative.recorded_steps import DraftedRecordedSteps
from tests.decode.demo import GREEDY, PROMPTS, load
from tests.ranks.on_gpu import IDS, bits, different_caches, one_stream

pytestmark = pytest.mark.gpu

NO_STOPS: frozenset[int] = frozenset()
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)


@pytest.fixture(scope="module", params=DRAFTS)
def shared(request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """Ranks with a module, and a lone engine with the same one."""
    name = request.param
    return one_stream(name), load(draft=name, draft_weights=str(DRAFTS[name]))


@pytest.fixture
def ranks(shared: tuple[Engine, Engine]) -> Iterator[Engine]:
    shared[0].reset()
    yield shared[0]
    shared[0].reset()


@pytest.fixture(scope="module")
def plain() -> Engine:
    return one_stream()


def steps_of(engine: Engine) -> DraftedRecordedSteps:
    assert isinstance(engine.steps, DraftedRecordedSteps)
    return engine.steps


def assert_ranks_alike(engine: Engine) -> None:
    """The rows that later steps read, all that the modules keep, and the last drafts."""
    assert different_caches(engine, engine) == []
    first, *others = (rank.draft for rank in engine.state.ranks)
    assert first is not None
    for other in others:
        assert other is not None
        for one, expected in zip(other.tensors(), first.tensors(), strict=True):
            assert torch.equal(one.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))
    memory, *their = (along.memory for along in steps_of(engine).alongs)
    for other in their:
        assert torch.equal(other.drafts_N.cpu(), memory.drafts_N.cpu())
        assert torch.equal(bits(other.logits_NV.cpu()), bits(memory.logits_NV.cpu()))


@torch.inference_mode()
def draft_logits(engine: Engine, token: int, count: int) -> Tensor:
    """Of drafts behind the engine's sequence and ``token``."""
    steps = steps_of(engine)
    for along in steps.alongs:
        along.memory.inputs[along.head][:1].fill_(token)
    step = steps.draft_step(count)
    step.run(step.tokens)
    return steps.along.memory.logits_NV[:count].cpu()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_without_drafts(ranks: Engine, plain: Engine, prompt: str) -> None:
    ids = PROMPTS[prompt]
    expected = list(plain.generate(ids, 120, GREEDY, NO_STOPS))
    assert list(ranks.generate(ids, 120, GREEDY, NO_STOPS)) == expected
    assert ranks.last_run is not None
    assert ranks.last_run.drafts is not None
    assert ranks.last_run.drafts.tokens == 119
    assert_ranks_alike(ranks)


def test_sampled_text_is_repeated_by_its_seed(ranks: Engine) -> None:
    ids = PROMPTS["stories"]
    texts = [list(ranks.generate(ids, 60, SAMPLED, NO_STOPS)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert_ranks_alike(ranks)


@pytest.mark.parametrize("chunk", [1, 7, 60, 300])
def test_drafts_are_those_of_a_lone_engine(shared: tuple[Engine, Engine], chunk: int) -> None:
    """Behind prompts in chunks that share their last streams, and in steps of up to 8 tokens."""
    logits = []
    for engine in shared:
        engine.reset()
        for first in range(0, 299, chunk):
            engine.prefill(IDS[first : min(first + chunk, 299)])
        logits.append(draft_logits(engine, IDS[299], 1))
    assert_ranks_alike(shared[0])
    found, expected = logits
    error = float((found - expected).norm() / expected.norm())
    assert error < 0.2, error


def test_drafts_are_kept_as_often_as_those_of_a_lone_engine(shared: tuple[Engine, Engine]) -> None:
    kept = []
    for engine in shared:
        tokens = steps = 0
        for prompt in PROMPTS.values():
            list(engine.generate(prompt, 80, GREEDY, NO_STOPS))
            assert engine.last_run is not None
            assert engine.last_run.drafts is not None
            tokens += engine.last_run.drafts.tokens
            steps += engine.last_run.drafts.steps
        kept.append(tokens / steps)
    assert kept[0] > 1.3
    assert kept[0] == pytest.approx(kept[1], rel=0.1)


def test_generations_are_closed_and_begun_again(ranks: Engine) -> None:
    ids = PROMPTS["stories"]
    expected = list(ranks.generate(ids, 30, GREEDY, NO_STOPS))
    for taken in (1, 2, 6, 7):
        tokens = ranks.generate(ids, 30, GREEDY, NO_STOPS)
        assert [next(tokens) for _ in range(taken)] == expected[:taken]
        tokens.close()
        assert different_caches(ranks, ranks) == []
        follow = [*ids, *expected[:taken]]
        answer = list(ranks.generate(follow, 5, GREEDY, NO_STOPS, reuse=True))
        assert answer == expected[taken : taken + 5]
