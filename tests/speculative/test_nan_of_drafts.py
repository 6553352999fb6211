"""Drafts end in front of the first one whose logits have NaN."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.sampling import NAN_TOKEN
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import drafted_engine

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
