"""Rejected drafts leave no trace: caches after other drafts, and after none."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.caches.filled import filled_rows
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, drafted_engine, plain_engine
from tests.speculative.scripted import GREEDY, NO_STOPS, Script, plain_text, scripted


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "fp8", "compute_dtype": "bfloat16"}])
def test_spec11_h48_other_rejected_drafts_leave_the_same_caches(
    kind: MtpKind, settings: dict[str, Any]
) -> None:
    """Equal steps: the same drafts are kept and as many rejected, of other tokens."""
    ids = random_ids(13)
    text = plain_text(kind, ids, 40, **settings)
    count = 1 if kind == "classic" else 5
    engines = []
    for seed in (1, 2):
        script = Script([*ids, *text], lambda position: position * 5 % (count + 1), seed)
        engine = scripted(drafted_engine(kind, **settings), script)
        run = engine.generate(ids, 40, GREEDY, NO_STOPS)
        for _ in range(33):
            next(run)
        engines.append(engine)
        run.close()
    one, other = map(rows_of, engines)
    assert engines[0].token_ids == engines[1].token_ids
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "fp8", "compute_dtype": "bfloat16"}])
def test_caches_are_bit_for_bit_those_of_a_run_without_drafts(
    kind: MtpKind, settings: dict[str, Any]
) -> None:
    ids = random_ids(13)
    plain = plain_engine(kind, **settings)
    text = list(plain.generate(ids, 40, GREEDY, NO_STOPS))
    script = Script([*ids, *text], lambda position: position * 5 % 6)
    engine = scripted(drafted_engine(kind, **settings), script)
    assert list(engine.generate(ids, 40, GREEDY, NO_STOPS)) == text
    one = rows_of(engine)
    other = {
        row.name: torch.cat(list(row.parts()))
        for row in filled_rows(plain.state.layers, plain.position, engine.state.undoable_tokens)
        if row.count
    }
    assert [name for name in other if not torch.equal(one[name], other[name])] == []
