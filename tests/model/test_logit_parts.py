"""Logits of long sequences, computed for no more tokens at once than the plan counts."""

import pytest
import torch
from torch import Tensor

from tests.model.tiny import random_ids, tiny_engine


def test_logits_are_computed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a chunk of 16,384 tokens take 8.5 GB, which no plan counts."""
    engine = tiny_engine()
    compute = engine.steps.logits
    asked: list[int] = []

    def counted(hidden_TE: Tensor) -> Tensor:
        asked.append(len(hidden_TE))
        return compute(hidden_TE)

    monkeypatch.setattr(engine.steps, "logits", counted)
    logits_TV = engine.logits(random_ids(20), chunk_sizes=[17, 3])
    assert asked == [8, 8, 1, 3]
    monkeypatch.undo()
    engine.reset()
    last_V = engine.prefill(random_ids(20))
    torch.testing.assert_close(logits_TV[-1], last_V, rtol=1e-5, atol=1e-5)
