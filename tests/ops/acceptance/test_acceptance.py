"""What acceptance of a block means: replacements, what stays for the next step and for the host."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.acceptance import KEPT, enter_drafts, judge_drafts, settle_block
from dsv4.ops.sampling import NAN_TOKEN, sample_token

SLOTS = 32
STEP = 60


def settle(
    replacements: list[int], drafts: list[int], behind: int, met_nan: int = 0
) -> tuple[list[int], int, int, int]:
    """The tokens that a step at 60 gave, its drafts, the rejected tokens and the next token."""
    ring_3R = torch.full((3, SLOTS), -9)
    rejected_1 = torch.tensor([-9])
    next_1 = torch.tensor([-9])
    judged = (torch.tensor(replacements), torch.tensor(drafts)) if drafts else None
    place = (torch.tensor([STEP + 1 + len(drafts)]), rejected_1)
    nan_1 = torch.tensor([met_nan], dtype=torch.int32)
    settle_block(judged, torch.tensor(behind), place, next_1, ring_3R, nan_1)
    given = int(ring_3R[1, STEP % SLOTS])
    tokens = [int(ring_3R[0, (STEP + 1 + index) % SLOTS]) for index in range(given)]
    assert int((ring_3R[0] != -9).sum()) == given
    return tokens, int(ring_3R[2, STEP % SLOTS]), int(rejected_1), int(next_1)


def test_drafts_stay_up_to_the_first_that_is_not_kept() -> None:
    assert settle([KEPT, KEPT, 6], [9, 8, 7], 5) == ([9, 8, 6], 3, 1, 6)
    assert settle([4, KEPT, KEPT], [9, 8, 7], 5) == ([4], 3, 3, 4)
    assert settle([KEPT, KEPT, KEPT], [9, 8, 7], 5) == ([9, 8, 7, 5], 3, 0, 5)
    assert settle([], [], 5) == ([5], 0, 0, 5)


def test_drafts_that_are_none_count_as_none() -> None:
    assert settle([KEPT, 3, KEPT], [9, -1, 2], 5) == ([9, 3], 1, 2, 3)


def test_nan_anywhere_gives_no_token_but_for_a_step_without_drafts() -> None:
    """The token before the drafts stays what is next: it is run again by itself."""
    for replacements, behind, met_nan in (
        ([KEPT, NAN_TOKEN], 5, 0),
        ([4, NAN_TOKEN], 5, 0),
        ([KEPT, KEPT], NAN_TOKEN, 0),
        ([4, KEPT], 5, 1),
    ):
        assert settle(replacements, [9, 8], behind, met_nan) == ([], 2, 3, -9)
    assert settle([], [], NAN_TOKEN) == ([NAN_TOKEN], 0, 0, 0)
    assert settle([], [], 5, met_nan=1) == ([NAN_TOKEN], 0, 0, 0)


def replacements_of(logits_MV: Tensor, drafts: list[int], settings: tuple[float, ...]) -> list[int]:
    read = (torch.tensor(settings), torch.tensor([7]), torch.tensor([100 + len(drafts)]))
    draft_logits_NV = logits_MV[: len(drafts)] * 0.5
    return judge_drafts(logits_MV, draft_logits_NV, torch.tensor(drafts), *read).tolist()


def test_greedy_replacements_are_the_largest_logits_and_the_lowest_ids() -> None:
    logits_MV = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0], [torch.nan, 1.0, 0.0], [0, 0, 1.0]])
    greedy = (0.0, 1.0, 0.0, 0.0)
    assert replacements_of(logits_MV, [1, 0, 1], greedy) == [KEPT, KEPT, NAN_TOKEN]
    assert replacements_of(logits_MV, [2, 1, 1], greedy) == [1, 0, NAN_TOKEN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_judge_no_draft(temperature: float) -> None:
    logits_MV = torch.zeros((4, 3))
    logits_MV[0, 1] = torch.inf
    logits_MV[1, 2] = torch.nan
    logits_MV[2] = -torch.inf
    settings = (temperature, 1.0, 0.0, 0.0)
    assert replacements_of(logits_MV, [1, 2, 0], settings) == [NAN_TOKEN] * 3


@pytest.mark.parametrize("settings", [(0.0, 1.0, 0.0, 0.0), (0.8, 0.9, 0.0, 0.0)])
def test_a_row_without_a_draft_is_drawn_as_any_token(settings: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_MV = 2 * torch.randn((4, 50), generator=generator)
    seed_1 = torch.tensor([7])
    expected = [
        int(sample_token(row, torch.tensor(settings), seed_1, torch.tensor([100 + at])))
        for at, row in enumerate(logits_MV[:3])
    ]
    assert replacements_of(logits_MV, [-1, -1, -1], settings) == expected


def test_a_draft_with_the_draft_s_own_distribution_is_always_kept() -> None:
    """Where p is q, nothing is rejected."""
    generator = torch.Generator().manual_seed(2)
    logits_MV = 2 * torch.randn((6, 50), generator=generator)
    read = (torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([9]), torch.tensor([40]))
    drafts_N = logits_MV[:5].argmax(1)
    assert judge_drafts(logits_MV, logits_MV[:5], drafts_N, *read).tolist() == [KEPT] * 5


def test_drafts_enter_as_tokens_that_exist() -> None:
    tokens_N = torch.zeros(3, dtype=torch.int64)
    enter_drafts(torch.tensor([4, -1, 2]), tokens_N)
    assert tokens_N.tolist() == [4, 0, 2]
