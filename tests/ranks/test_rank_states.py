"""A saved sequence belongs to no number of ranks: what was saved by some goes on with others."""

from pathlib import Path

import pytest
import torch

from dsv4 import SamplingParams
from tests.model.tiny import random_ids
from tests.ranks.exact import EXACT
from tests.ranks.simulated import different_caches, ranks_engine

IDS = random_ids(150)
GREEDY = SamplingParams(temperature=0)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [(1, 2), (1, 4), (2, 1), (4, 2), (2, 4)])
def test_a_sequence_goes_on_with_another_number_of_ranks(
    source: int, target: int, tmp_path: Path
) -> None:
    first, other = (ranks_engine(ranks, EXACT, kv_dtype="fp8") for ranks in (source, target))
    # What the others held before is gone.
    other.prefill(IDS[100:])
    for position in (5, 130):
        first.prefill(IDS[first.position : position])
        first.save_state(tmp_path / "state")
        other.load_state(tmp_path / "state")
        assert other.token_ids == IDS[:position]
        if source == 1:
            assert different_caches(other, first) == []
        other.save_state(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
        for engine in (first, other):
            engine.rewind(3)
        for tokens in (IDS[position - 3 : position], IDS[position : position + 1]):
            assert torch.equal(other.decode(tokens), first.decode(tokens))
        first.rewind(1)


def test_a_generation_goes_on_behind_a_loaded_sequence(tmp_path: Path) -> None:
    first, other = (ranks_engine(ranks, EXACT) for ranks in (1, 4))
    answer = list(first.generate(IDS[:20], 5, GREEDY, frozenset()))
    first.save_state(tmp_path / "state")
    whole = [*IDS[:20], *answer, *IDS[60:64]]
    expected = list(first.generate(whole, 4, GREEDY, frozenset()))
    other.load_state(tmp_path / "state")
    assert list(other.generate(whole, 4, GREEDY, frozenset(), reuse=True)) == expected
    assert other.last_run is not None
    assert other.last_run.reused_tokens == 24
