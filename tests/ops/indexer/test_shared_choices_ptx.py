"""Ranks that share the tokens of a prefill step choose for their own and send each other the lists,
executed on the CPU.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.token_share import TokenShare
from dsv4.ops.indexer import prefill
from dsv4.peers import InboxLayout, Peers
from tests.ops.cases import normal
from tests.ops.indexer.drawn import drawn_keys
from tests.ops.indexer.meta import WIDTH, selection
from tests.ops.recorded import HOPPER
from tests.ptx.nvrtc import SourceEdit, run_recorded
from tests.shared_results import shared

pytestmark = pytest.mark.slow

SLOTS, TOPK = 90, 16
# The recording is of the longest step. A rank has one tile more than the other, of five tokens.
MOST, TOKENS = 200, 37
OTHER_TILES = SourceEdit(
    "token_share.cuh",
    "return (own / TOKEN_TILE * OWNERS + owner) * TOKEN_TILE + own % TOKEN_TILE;",
    "return own;",
)
TO_ONE = SourceEdit("top_k.cu", "rank < RANKS; ++rank", "rank < 1; ++rank")
# Keys behind those of the step: as they are before it has written any.
BEFORE = SourceEdit(
    "index_scores.cu",
    "start_keys(shared, data, scales, now, 0, old_tiles);",
    "start_keys(shared, data + slots * ROW_BYTES, scales + slots, now, 0, old_tiles);",
)


class Step:
    """Choices of ``TOKENS`` tokens, the first of which see too few entries to choose."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        keys = drawn_keys(SLOTS)
        assert keys.block_scale is not None
        self.data, self.scales = keys.data, keys.block_scale
        self.q_TID = normal(MOST, heads, WIDTH, seed=1, dtype=torch.bfloat16)
        self.weight_TI = normal(MOST, heads, seed=2)
        self.positions_T = torch.arange(MOST) * 5 + 20

    def launches(self, rank: int, ranks: int) -> list[Launch]:
        layout = InboxLayout(ranks, 8, 8, TOPK)
        peers = Peers.planned(rank, layout, MOST) if ranks > 1 else None
        recording = Recording(HOPPER, MOST, peers=peers)
        arguments = selection(MOST, SLOTS, self.heads)._replace(index_topk=TOPK)
        prefill.index_select(recording, *arguments)
        assert len(recording.meetings) == (ranks > 1)
        return [item for item in recording.items if isinstance(item, Launch)]

    def choices(self, ranks: int, edit: Mapping[str, SourceEdit] | None = None) -> Tensor:
        """int64 ``[ranks, MOST, K]`` of all ranks; −7: not written."""
        chosen_RTK = torch.full((ranks, MOST, TOPK), -7)
        for rank in range(ranks):
            table_P = torch.zeros(4 * ranks + 3, dtype=torch.int64)
            table_P[3 * ranks + 3 :] = torch.tensor([one.data_ptr() for one in chosen_RTK])
            first = TokenShare(rank, ranks).token(0)
            score_TS = torch.full((MOST, SLOTS + 3), -1, dtype=torch.int32)
            tensors: dict[str, Any] = {
                "q": self.q_TID[first:],
                "weights": self.weight_TI[first:],
                "data": self.data,
                "scales": self.scales,
                "positions": self.positions_T,
                "scores": score_TS,
                "orders": score_TS,
                "nan": torch.zeros(1, dtype=torch.int32),
                "out": chosen_RTK[rank, first:],
                **({"peers": table_P} if ranks > 1 else {}),
            }
            for launch in self.launches(rank, ranks):
                kernel = launch.signature.kernel
                own = {name: tensors[name] for name in tensors if name in launch.arguments}
                if kernel == "top_k_tokens":
                    own["positions"] = self.positions_T[first:]
                run_recorded(launch, "sm_90a", own, TOKENS, edit=(edit or {}).get(kernel))
        return chosen_RTK


def choices_of_one(heads: int) -> Tensor:
    """Those of a lone rank, for the first test that asks and for all others."""
    return shared(("choices of a lone rank", heads), lambda: Step(heads).choices(1)[0].clone())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("heads", [8, 64])
def test_every_rank_gets_the_lists_of_all_tokens(heads: int) -> None:
    """Heads of the kernel of many tokens, of which these are too few, and of others."""
    whole_TK = choices_of_one(heads)
    assert bool((whole_TK[:TOKENS] != -7).all())
    for chosen_TK in Step(heads).choices(2):
        assert torch.equal(chosen_TK, whole_TK)


def test_keys_that_the_step_writes_are_not_read_before() -> None:
    """Tokens from position 60 on complete entry 15, of the first tile that a rank asks for."""
    step = Step(8)
    step.positions_T = torch.arange(MOST) + 60
    whole_TK = step.choices(1)[0].clone()
    before = torch.zeros_like(step.data)
    before[:15] = step.data[:15]
    step.data = torch.cat([step.data, before])
    step.scales = torch.cat([step.scales, step.scales])
    for chosen_TK in step.choices(2, {"index_scores": BEFORE}):
        assert torch.equal(chosen_TK, whole_TK)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "edit",
    [{"index_scores": OTHER_TILES}, {"top_k_tokens": OTHER_TILES}, {"top_k_tokens": TO_ONE}],
    ids=["scores of other tokens", "lists of other tokens", "sent to one"],
)
def test_a_fault_is_seen(edit: Mapping[str, SourceEdit]) -> None:
    whole_TK = choices_of_one(8)
    found_RTK = Step(8).choices(2, edit)
    assert any(not torch.equal(chosen_TK, whole_TK) for chosen_TK in found_RTK)
