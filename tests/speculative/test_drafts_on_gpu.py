"""Draft modules with the CUDA ops against the torch ops on the same streams of the main model,
position by position.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.layers.values import Watch
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.on_gpu import (
    GEOMETRIES,
    KINDS,
    VOCABULARY,
    draft_state,
    engine_on_gpu,
    recorded_drafts,
    steps_of,
)

pytestmark = pytest.mark.gpu

# Around the first token, the entries of the compressors, the window and twice the window.
POSITIONS = [1, 2, 3, 4, 9, 15, 16, 17, 21, 32, 47]
DRAFTS = 4


def ids_of(count: int, seed: int = 0) -> list[int]:
    return [token % VOCABULARY for token in random_ids(count, seed=seed)]


class Pair:
    """An engine with the CUDA ops, and the module of one with the torch ops that is told what the
    former's main model computes: two main models would soon differ, as random ones choose other
    experts for a bit of difference.
    """

    def __init__(self, kind: MtpKind, geometry: str = "usual", chunk: int = 64) -> None:
        self.engine = engine_on_gpu(kind, geometry=geometry, prefill_chunk=chunk)
        other = engine_on_gpu(kind, geometry=geometry, ops="torch")
        assert isinstance(other.steps, DraftedSteps)
        self._chunk = chunk
        self._reference = other
        self._drafter = other.steps.drafter
        self._taps: dict[str, Tensor] = {}
        names = self._drafter.scope.taps
        watch = Watch(self._keep, lambda name: name in names)
        self._run = self.engine.steps.traced(watch)

    def _keep(self, name: str, rows: Tensor) -> None:
        self._taps[name] = rows.cuda()

    def reset(self) -> None:
        self.engine.reset()
        self._reference.reset()

    @torch.inference_mode()
    def append(self, ids: Sequence[int]) -> None:
        """In chunks; the module of the torch ops remembers the same streams."""
        for first in range(0, len(ids), self._chunk):
            part = list(ids[first : first + self._chunk])
            start = self.engine.position
            self._run(part)
            draft_state(self._reference).begin(start, len(part))
            self._drafter.remember(part, self._taps, start)

    def check(self, token: int) -> None:
        """Drafts of both behind ``token``."""
        tokens, found = recorded_drafts(self.engine, token, DRAFTS)
        assert tokens == found.argmax(1).tolist()
        expected = self._expected(token, tokens)
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        # A row may take another expert for a difference of a bit.
        assert float(error.median()) < 0.03, (self.engine.position, error.tolist())
        assert float(error.max()) < 0.5, (self.engine.position, error.tolist())

    @torch.inference_mode()
    def _expected(self, token: int, chosen: list[int]) -> Tensor:
        position = self.engine.position

        def choose(logits_V: Tensor, at: int) -> Tensor:
            return torch.tensor(chosen[at - position - 1], device=logits_V.device)

        return self._drafter.propose(token, position, len(chosen), choose).logits_NV


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_torch_ops_at_every_position(kind: MtpKind, geometry: str) -> None:
    ids = ids_of(64)
    pair = Pair(kind, geometry)
    for position in POSITIONS:
        pair.reset()
        pair.append(ids[:position])
        pair.check(ids[position])


@pytest.mark.parametrize("chunk", [1, 6, 12, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_rewinds_and_chunks_change_no_draft(kind: MtpKind, chunk: int) -> None:
    ids = ids_of(200)
    pair = Pair(kind, chunk=chunk)
    pair.append(ids[:70])
    pair.check(ids[70])
    for step in range(2):
        at = pair.engine.position
        pair.append([*ids[at : at + 3], *ids_of(5, seed=step + 1)])
        pair.engine.rewind(5)
        pair.check(7)
        pair.check(ids[pair.engine.position])
    pair.engine.rewind(3)
    pair.check(ids[pair.engine.position])
    for token in ids[pair.engine.position : pair.engine.position + 20]:
        pair.append([token])
    pair.check(9)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_a_loaded_state_are_those_of_its_writer(
    kind: MtpKind, tmp_path: Path
) -> None:
    ids = ids_of(60)
    first, other = (engine_on_gpu(kind, prefill_chunk=chunk) for chunk in (64, 16))
    other.prefill(ids_of(45, seed=4))
    for position in (15, 16, 17, 40):
        first.prefill(ids[first.position : position])
        first.save_state(tmp_path / "state")
        other.load_state(tmp_path / "state")
        assert draft_state(other).covers(position)
        drafts = [recorded_drafts(engine, ids[position], DRAFTS) for engine in (first, other)]
        assert drafts[0][0] == drafts[1][0]
        assert torch.equal(drafts[0][1], drafts[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_drafts_are_the_first_ones(kind: MtpKind) -> None:
    engine = engine_on_gpu(kind)
    engine.prefill(ids_of(30))
    most = steps_of(engine).along.module.scope.most
    tokens, logits_NV = recorded_drafts(engine, 7, most)
    for count in range(1, most):
        fewer, logits = recorded_drafts(engine, 7, count)
        assert fewer == tokens[:count]
        assert torch.equal(logits, logits_NV[:count])
