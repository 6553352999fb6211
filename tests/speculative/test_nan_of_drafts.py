"""Drafts end in front of the first one whose logits have NaN, a step of drafts that meets NaN is
not counted, and NaN of steps that nobody reads is forgotten.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import SamplingParams
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.speculative.block_ring import Given
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, drafted_engine, plain_engine
from tests.speculative.scripted import NO_STOPS
from tests.speculative.world import START, ChangingCount, World

POSITION = 20


@pytest.mark.parametrize("kind", ["classic", "dspark"])
@pytest.mark.parametrize("good", [0, 1, 3])
@torch.inference_mode()
def test_drafts_end_in_front_of_nan(kind: MtpKind, good: int) -> None:
    engine = drafted_engine(kind)
    engine.prefill(random_ids(POSITION))

    def choose(logits_V: Tensor, position: int) -> Tensor:
        """Each draft of the position that it is for."""
        is_nan = position == POSITION + 1 + good
        return torch.tensor(NAN_TOKEN) if is_nan else torch.tensor(position)

    drafter = engine.steps.drafter  # pyright: ignore[reportAttributeAccessIssue]
    found = drafter.propose(7, POSITION, 4, choose)
    assert found.tokens == list(range(POSITION + 1, POSITION + 1 + good))
    assert len(found.logits_NV) == good


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_where_a_step_with_drafts_meets_nan_the_token_alone_decides(
    kind: MtpKind, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the logits themselves are finite."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    ids = random_ids(POSITION)
    expected = list(plain_engine(kind).generate(ids, 9, sampling, NO_STOPS))
    engine = drafted_engine(kind)
    decode = engine.steps.decode
    drafted = []

    def meets_nan(token_ids: Sequence[int]) -> Tensor:
        logits_TV = decode(token_ids)
        if len(token_ids) == 1:
            return logits_TV
        drafted.append(len(token_ids) - 1)
        engine.state.nan_1.fill_(1)
        return -logits_TV

    monkeypatch.setattr(engine.steps, "decode", meets_nan)
    assert list(engine.generate(ids, 9, sampling, NO_STOPS)) == expected
    assert drafted


def test_nan_of_a_draft_is_run_again_without_drafts() -> None:
    world = World(5)
    world.nan[START + 9] = True
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    assert (START + 6, 6) in world.log
    assert (START + 6, 1) in world.log
    world.expect_at(START + 40)
    stats = world.tally.stats()
    assert stats.accepted == stats.drafted, "the step that met NaN says nothing of drafts"


def test_what_is_queued_behind_nan_of_drafts_is_not_read_in_its_place() -> None:
    """The device has done both when the host reads the first, and they began at one place."""
    world = World(5)
    world.nan[START + 9] = True
    world.count = ChangingCount([5, 5, 0, 5])
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    assert (START + 6, 1) in world.log
    world.expect_at(START + 40)


@pytest.mark.parametrize("reads", [1, 2, 5])
def test_where_another_rank_met_nan_a_step_goes_on_behind_the_last_token_that_all_kept(
    reads: int,
) -> None:
    """This one has kept tokens by then, and has run the next step."""
    world: Any = World(5)
    world.wrong = [place % 4 == 0 for place in range(400)]
    read = world.read
    left = reads

    def read_of_all(position: int) -> Given:
        nonlocal left
        left -= 1
        given = read(position)
        return given if left else given._replace(tokens=[])

    world.read = read_of_all
    assert list(world.generate(40)) == world.text[START + 1 : START + 41]
    world.expect_at(START + 40)


def test_nan_of_steps_in_vain_is_not_the_sequence_s() -> None:
    """Such a sequence can be saved."""
    world = World(5)
    world.nan[START + 9] = True
    tokens = world.generate(40)
    next(tokens)
    assert (START + 6, 6) in world.log
    assert world.state.met_nan
    tokens.close()
    world.expect_at(START + 1)
    assert not world.state.met_nan


def test_an_interrupted_wait_forgets_no_nan() -> None:
    """Nobody knows then whether it is the sequence's."""

    def interrupted(_position: int) -> Any:
        raise KeyboardInterrupt

    world: Any = World(5)
    world.nan[START + 3] = True
    world.read = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(world.generate(40))
    assert world.state.met_nan
