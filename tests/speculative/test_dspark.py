"""DSpark against its formula in float64, position by position: first token, window borders, chunks,
rejected drafts, rewinds.
"""

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.caches.draft import DraftState
from dsv4.layers.dspark import Drafts, DSpark
from dsv4.ops import TORCH
from dsv4.ops.drafts import TORCH_DRAFTS
from dsv4.speculative.drafter import Proposal
from tests.model.tiny import random_ids
from tests.speculative.formula import DSparkFormula
from tests.speculative.models import assert_near, drafted_config, drafted_engine, drafted_weights

# Around the first token, the entries of the compressors, the window and twice the window.
POSITIONS = [1, 2, 3, 4, 15, 16, 17, 21, 32, 47]


@pytest.fixture(scope="module")
def formula() -> DSparkFormula:
    config = drafted_config("dspark")
    return DSparkFormula(config, drafted_weights(config, "dspark"))


@pytest.fixture(scope="module")
def taps() -> list[Tensor]:
    engine = drafted_engine("dspark")
    found = engine.trace(random_ids(64), [f"layers.{layer}.streams" for layer in (1, 2, 3)])
    return [found[f"layers.{layer}.streams"].double() for layer in (1, 2, 3)]


@torch.inference_mode()
def drafts_of(engine: Engine, anchor: int) -> Drafts:
    """Greedy drafts behind the engine's sequence."""
    module, state = engine.draft_modules[0], engine.state.draft
    assert isinstance(module, DSpark)
    assert isinstance(state, DraftState)
    state.position_1.fill_(engine.position)
    ids = torch.tensor([anchor, *[module.keys.noise_token_id] * 4])
    block = module.block(TORCH, TORCH_DRAFTS, ids, state)
    return module.draft(TORCH_DRAFTS, block, ids[:1], lambda _, logits_V: logits_V.argmax()[None])


@torch.inference_mode()
def proposal_of(engine: Engine, anchor: int, count: int) -> Proposal:
    """As a step asks for them."""

    def largest(logits_V: Tensor, position: int) -> Tensor:
        return logits_V.argmax()

    drafter = engine.steps.drafter  # pyright: ignore[reportAttributeAccessIssue]
    return drafter.propose(anchor, engine.position, count, largest)


def check(engine: Engine, formula: DSparkFormula, taps: list[Tensor], anchor: int) -> None:
    found = drafts_of(engine, anchor)
    proposed = proposal_of(engine, anchor, 5)
    assert proposed.tokens == found.tokens_B.tolist()
    assert torch.equal(proposed.logits_NV, found.logits_BV)
    z_BE, base_BV = formula.block([tap[: engine.position] for tap in taps], anchor)
    previous = anchor
    for slot, token in enumerate(found.tokens_B.tolist()):
        logits_V, confidence = formula.markov(z_BE[slot], base_BV[slot], previous)
        assert_near(found.logits_BV[slot], logits_V)
        assert float(found.confidence_B[slot]) == pytest.approx(confidence, abs=1e-4)
        previous = token


def test_drafts_are_those_of_the_formula_at_every_position(
    formula: DSparkFormula, taps: list[Tensor]
) -> None:
    ids = random_ids(64)
    engine = drafted_engine("dspark")
    for position in POSITIONS:
        engine.reset()
        engine.prefill(ids[:position])
        check(engine, formula, taps, ids[position])


@pytest.mark.parametrize("chunk", [1, 16])
def test_prompts_in_chunks_leave_the_same_drafts(
    chunk: int, formula: DSparkFormula, taps: list[Tensor]
) -> None:
    ids = random_ids(64)
    engine = drafted_engine("dspark", prefill_chunk=chunk)
    engine.prefill(ids[:37])
    check(engine, formula, taps, ids[37])


@pytest.mark.parametrize("position", [1, 14, 30])
def test_rejected_drafts_and_rewinds_change_no_draft(
    position: int, formula: DSparkFormula, taps: list[Tensor]
) -> None:
    ids = random_ids(64)
    engine = drafted_engine("dspark")
    engine.prefill(ids[:position])
    for step in range(2):
        wrong = random_ids(6, seed=step + 1)
        drafts_of(engine, ids[engine.position])
        engine.decode([*ids[engine.position : engine.position + 2], *wrong])
        engine.rewind(6)
        check(engine, formula, taps, ids[engine.position])
    engine.rewind(3)
    check(engine, formula, taps, ids[engine.position])


def test_the_longest_rewind_behind_a_long_prompt_finds_its_window(
    formula: DSparkFormula, taps: list[Tensor]
) -> None:
    ids = random_ids(64)
    engine = drafted_engine("dspark")
    engine.prefill(ids[:56])
    for tokens in (8, 3):
        engine.rewind(tokens)
    check(engine, formula, taps, ids[45])


def test_fewer_drafts_are_the_first_of_a_whole_block() -> None:
    engine = drafted_engine("dspark", draft_tokens=2)
    engine.prefill(random_ids(20))
    two, five = (proposal_of(engine, 7, count) for count in (2, 5))
    assert len(two.tokens) == 2
    assert two.tokens == five.tokens[:2]
    assert torch.equal(two.logits_NV, five.logits_NV[:2])


def test_spec11_j81_the_last_tokens_of_a_block_change_its_first_draft() -> None:
    engine = drafted_engine("dspark")
    engine.prefill(random_ids(20))
    module, state = engine.draft_modules[0], engine.state.draft
    assert isinstance(module, DSpark)
    assert state is not None
    first = []
    for last in (9, 10):
        state.position_1.fill_(20)
        with torch.inference_mode():
            ids = torch.tensor([7, 9, 9, 9, last])
            first.append(module.block(TORCH, TORCH_DRAFTS, ids, state).logits_BV[0])
    assert float((first[0] - first[1]).abs().max()) > 1e-3
