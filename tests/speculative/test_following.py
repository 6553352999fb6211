"""Generation with drafts: the text of no drafts, ends inside a block, and no trace of what was
rejected.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.caches.filled import filled_rows
from dsv4.speculative.drafter import ChooseAt, Drafter, Proposal
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, drafted_engine, plain_engine

GREEDY = SamplingParams(temperature=0)
NO_STOPS: frozenset[int] = frozenset()


class Scripted:
    """A drafter that proposes what it is told, while the module runs along."""

    def __init__(self, drafter: Drafter, script: "Script") -> None:
        self.taps = drafter.taps
        self.trained_block = drafter.trained_block
        self.most = drafter.most
        self.remember = drafter.remember
        self._drafter = drafter
        self._script = script

    def propose(self, token: int, position: int, count: int, choose: ChooseAt) -> Proposal:
        own = self._drafter.propose(token, position, count, choose)
        tokens = self._script(position, len(own.tokens))
        logits_NV = torch.zeros((len(tokens), 89), dtype=torch.float32)
        return Proposal(tokens, logits_NV)


class Script:
    """Drafts of a known text of which some are wrong: at position p those of ``wrong(p)``."""

    def __init__(self, text: list[int], kept: Any, seed: int = 0) -> None:
        self._text = text
        self._kept = kept
        self._other = torch.Generator().manual_seed(seed)

    def __call__(self, position: int, count: int) -> list[int]:
        right = self._text[position + 1 : position + 1 + count]
        kept = self._kept(position)
        wrong = torch.randint(2, 89, (count,), generator=self._other).tolist()
        return [
            token if slot < kept else (other if other != token else (token + 1) % 89)
            for slot, (token, other) in enumerate(zip(right, wrong, strict=False))
        ]


def scripted(engine: Engine, script: Script) -> Engine:
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)
    steps.drafter = Scripted(steps.drafter, script)
    return engine


def plain_text(kind: MtpKind, prompt: list[int], count: int, **settings: Any) -> list[int]:
    engine = plain_engine(kind, **settings)
    return list(engine.generate(prompt, count, GREEDY, NO_STOPS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [1, 3, 40])
def test_spec11_f43_greedy_text_is_that_without_drafts(kind: MtpKind, prompt: int) -> None:
    ids = random_ids(prompt)
    engine = drafted_engine(kind)
    assert list(engine.generate(ids, 40, GREEDY, NO_STOPS)) == plain_text(kind, ids, 40)
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.tokens == 39


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4, 5, "mixed"])
def test_spec11_j94_any_number_of_accepted_drafts_gives_the_same_text(kept: int | str) -> None:
    ids = random_ids(13)
    text = plain_text("dspark", ids, 60)
    numbers = {"mixed": lambda position: position * 7 % 6}.get(str(kept), lambda position: kept)
    engine = scripted(drafted_engine("dspark"), Script([*ids, *text], numbers))
    assert list(engine.generate(ids, 60, GREEDY, NO_STOPS)) == text
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    stats = engine.last_run.drafts
    if isinstance(kept, int):
        assert stats.steps == -(-59 // (kept + 1))
        assert [share for share in stats.acceptance[:kept]] == [1.0] * kept
        assert list(stats.acceptance[kept:]) == [0.0] * (len(stats.drafted) - kept)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 12])
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


@pytest.mark.parametrize("stop", range(1, 8))
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


@pytest.mark.parametrize("taken", range(1, 9))
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


def rows_of(engine: Engine) -> dict[str, Tensor]:
    """Everything that a later step can read, of the model and of its draft module."""
    state = engine.state
    found = {
        one.name: torch.cat(list(one.parts()))
        for one in filled_rows(state.layers, state.position, state.undoable_tokens)
        if one.count
    }
    draft = state.draft
    assert draft is not None
    for stage, keys in enumerate(draft.stages):
        # Of classic MTP the last row is run again by the next draft.
        kept = torch.arange(max(0, state.position - keys.window), state.position - 1)
        found[f"mtp.{stage}"] = keys.ring.data[kept % keys.ring.slots]
    if draft.streams_SME is not None:
        slot = (state.position - 1) % draft.streams_SME.shape[0]
        found["streams"] = draft.streams_SME[slot]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "fp8", "compute_dtype": "bfloat16"}])
def test_spec11_h48_other_rejected_drafts_leave_the_same_caches(
    kind: MtpKind, settings: dict[str, Any]
) -> None:
    """Equal steps: the same drafts are kept and as many rejected, of other tokens."""
    ids = random_ids(13)
    text = plain_text(kind, ids, 48, **settings)
    count = 1 if kind == "classic" else 5
    engines = []
    for seed in (1, 2):
        script = Script([*ids, *text], lambda position: position * 5 % (count + 1), seed)
        engine = scripted(drafted_engine(kind, **settings), script)
        run = engine.generate(ids, 48, GREEDY, NO_STOPS)
        for _ in range(40):
            next(run)
        engines.append(engine)
        run.close()
    one, other = map(rows_of, engines)
    assert engines[0].token_ids == engines[1].token_ids
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_with_a_seed_is_repeated_and_another_seed_is_another_text(kind: MtpKind) -> None:
    engine = drafted_engine(kind)
    texts = [
        list(engine.generate(random_ids(9), 30, SamplingParams(seed=seed), NO_STOPS))
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "sampled"])
def test_every_token_is_noted_with_its_log_probability(sampling: SamplingParams) -> None:
    ids = random_ids(13)
    noted = SamplingParams(temperature=sampling.temperature, seed=sampling.seed, logprobs=2)
    engine = drafted_engine("dspark")
    tokens = list(engine.generate(ids, 30, noted, NO_STOPS))
    assert engine.last_run is not None
    logprobs = engine.last_run.logprobs
    assert logprobs is not None
    logits = engine.logits([*ids, *tokens])[len(ids) - 1 : -1].log_softmax(1)
    for row, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        assert entry.logprob == pytest.approx(float(logits[row, token]), abs=1e-3)


def test_a_sequence_from_a_file_drafts_once_its_window_is_known(tmp_path: Any) -> None:
    engine = drafted_engine("classic")
    engine.prefill(random_ids(30))
    engine.save_state(tmp_path / "state")
    other = drafted_engine("classic")
    other.prefill(random_ids(60, seed=2))
    other.load_state(tmp_path / "state")
    assert other.state.draft is not None
    prompt = [*random_ids(30), *random_ids(20, seed=5)]
    drafted = []
    for tokens in range(30, 50):
        other.decode(prompt[tokens : tokens + 1])
        drafted.append(other.state.draft.covers(other.position))
    assert drafted == [False] * 15 + [True] * 5
    plain = plain_engine("classic")
    expected = list(plain.generate(prompt, 12, GREEDY, NO_STOPS))
    assert list(other.generate(prompt, 12, GREEDY, NO_STOPS, reuse=True)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_hardly_any_accepted_draft_is_said_once(
    kind: MtpKind, caplog: pytest.LogCaptureFixture
) -> None:
    ids = random_ids(13)
    text = plain_text(kind, ids, 60)
    engine = scripted(drafted_engine(kind), Script([*ids, *text], lambda _: 0))
    for _ in range(2):
        list(engine.generate(ids, 60, GREEDY, NO_STOPS))
    (record,) = caplog.records
    assert "0 of 58 first drafts were accepted, expected 20 % or more" in record.message
