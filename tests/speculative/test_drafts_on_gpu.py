"""Draft modules with the CUDA ops against the torch ops of the same model, position by position."""

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.on_gpu import GEOMETRIES, KINDS, VOCABULARY, engine_on_gpu, recorded_drafts

pytestmark = pytest.mark.gpu

# Around the first token, the entries of the compressors, the window and twice the window.
POSITIONS = [1, 2, 3, 4, 9, 15, 16, 17, 21, 32, 47]
DRAFTS = 4


def ids_of(count: int, seed: int = 0) -> list[int]:
    return [token % VOCABULARY for token in random_ids(count, seed=seed)]


@torch.inference_mode()
def torch_logits(engine: Engine, token: int, chosen: list[int]) -> Tensor:
    """Of the torch ops for these drafts."""
    steps = engine.steps
    assert isinstance(steps, DraftedSteps)
    position = engine.position

    def choose(logits_V: Tensor, at: int) -> Tensor:
        return torch.tensor(chosen[at - position - 1], device=logits_V.device)

    return steps.drafter.propose(token, position, len(chosen), choose).logits_NV


def check(engine: Engine, reference: Engine, token: int) -> None:
    tokens, found = recorded_drafts(engine, token, DRAFTS)
    assert tokens == found.argmax(1).tolist()
    expected = torch_logits(reference, token, tokens)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 0.05, (engine.position, error.tolist())


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_torch_ops_at_every_position(kind: MtpKind, geometry: str) -> None:
    ids = ids_of(64)
    engine = engine_on_gpu(kind, geometry=geometry)
    reference = engine_on_gpu(kind, geometry=geometry, ops="torch")
    for position in POSITIONS:
        for one in (engine, reference):
            one.reset()
            one.prefill(ids[:position])
        check(engine, reference, ids[position])


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_rewinds_and_chunks_change_no_draft(kind: MtpKind) -> None:
    ids = ids_of(200)
    engine = engine_on_gpu(kind, prefill_chunk=32)
    reference = engine_on_gpu(kind, ops="torch")
    for one in (engine, reference):
        one.prefill(ids[:130])
    check(engine, reference, ids[130])
    for step in range(2):
        wrong = ids_of(5, seed=step + 1)
        for one in (engine, reference):
            at = one.position
            one.decode([*ids[at : at + 3], *wrong])
            one.rewind(5)
        check(engine, reference, 7)
        check(engine, reference, ids[engine.position])
    for one in (engine, reference):
        one.rewind(3)
    check(engine, reference, ids[engine.position])
    for token in ids[engine.position : engine.position + 20]:
        engine.decode([token])
        reference.decode([token])
    check(engine, reference, 9)
