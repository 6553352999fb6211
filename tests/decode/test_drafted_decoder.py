"""DraftedDecoder on stand-ins for streams and steps: where drafts are captured."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.decode import cuda_graph_decoder
from dsv4.decode.drafted_decoder import DraftedDecoder
from dsv4.speculative.tally import DraftCount
from tests.decode.test_decoder_stand_ins import Quiet
from tests.step.test_token_loop import World


@pytest.mark.parametrize("position", [0, 1, 30])
def test_drafts_are_captured_behind_a_token(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classic MTP drafts from the row of the position before, which the first token has not."""
    state = World().state
    state.set_position(position)
    (position_1,) = state.positions_1.values()
    ran: list[tuple[str, int]] = []

    def step_of(name: str, tokens: int) -> Any:
        def run(tokens: int, *_: object) -> None:
            ran.append((f"{name} {tokens}", int(position_1)))
            position_1.add_(tokens)

        return SimpleNamespace(
            tokens=tokens,
            feed=SimpleNamespace(put=lambda ids: None),
            run=run,
            recorded=SimpleNamespace(ends=lambda max_context: [100, max_context]),
            sample=lambda: None,
        )

    for name, stand_in in (
        ("Stream", Quiet),
        ("Event", Quiet),
        ("graph_pool_handle", lambda: (0, 0)),
        ("synchronize", lambda device: None),
        ("stream", lambda stream: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graph_decoder, "CapturedStep", lambda step, *_: step)
    steps: Any = SimpleNamespace(
        state=state,
        head=torch.device("cpu"),
        count=DraftCount((2,)),
        alone=None,
        step=lambda tokens: step_of("verify", tokens),
        draft_step=lambda count: step_of("draft", count),
    )
    decoder = DraftedDecoder(steps, "full", 512)
    # Dense and not, each at the same place.
    verified = [("verify 1", position)] * 2 + [("verify 3", position)] * 2
    assert ran == [*verified, ("draft 2", max(1, position))]
    assert state.position == int(position_1) == position
    assert decoder.lengths == (1, 3)
    assert decoder.draft(2) is not None
    assert decoder.draft(3) is None
    # Of as many tokens as there is room for, none is a draft that another one verifies.
    assert DraftedDecoder(steps, "full", position + 2).lengths == (1,)
    assert DraftedDecoder(steps, "full", position + 3).lengths == (1, 3)
