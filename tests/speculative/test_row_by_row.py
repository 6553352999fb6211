"""Steps of several tokens that compute them one by one have the bits of steps of one token."""

from typing import Any

import pytest
import torch

from dsv4.caches.filled import filled_rows
from dsv4.ops import TORCH
from dsv4.ops.row_by_row import row_by_row
from tests.model.tiny import random_ids, tiny_engine


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 3, 8])
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "fp8", "compute_dtype": "bfloat16"}])
def test_logits_and_caches_are_bit_for_bit_those_of_single_tokens(
    tokens: int, settings: dict[str, Any]
) -> None:
    """Across entries of the compressors, the first of ratio 128 too, and a selection of entries."""
    ids = random_ids(150)
    one = tiny_engine(**settings)
    several = tiny_engine(**settings)
    for engine in (one, several):
        engine.prefill(ids[:110])
    several.steps._decode_ops = row_by_row(TORCH)  # pyright: ignore[reportAttributeAccessIssue]
    singles = torch.cat([one.decode([token]) for token in ids[110:134]])
    steps = [several.decode(ids[at : at + tokens]) for at in range(110, 134, tokens)]
    assert torch.equal(torch.cat(steps), singles)
    for found, expected in zip(*(rows(engine) for engine in (several, one)), strict=True):
        assert torch.equal(found, expected)


def rows(engine: Any) -> list[torch.Tensor]:
    state = engine.state
    filled = filled_rows(state.layers, state.position, state.undoable_tokens)
    return [part for one in filled for part in one.parts()]
