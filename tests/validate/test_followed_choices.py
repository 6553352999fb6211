"""Ops that follow somebody's choices: alone, and as each of several ranks computes its part."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.moe import ExpertWeights, Mixture, moe
from dsv4.ops.router import Router
from dsv4.step.meeting import Meeting, RankOps
from dsv4.validate.followed_choices import EXPERTS, FollowedChoices
from dsv4.weights.quant import QuantTensor

TOKENS, WIDTH, INNER, EXPERT_COUNT = 5, 16, 8, 6
GIVEN_TP = torch.tensor([[1, 2], [3, 4], [5, 0], [2, 5], [0, 3]])
TOKENS_T = torch.arange(TOKENS)


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts(rank: int | None, *lead: int) -> ExpertWeights:
    """Whole, or with half of the inner width."""
    w1, w3 = matrix(*lead, INNER, WIDTH, seed=1), matrix(*lead, INNER, WIDTH, seed=3)
    w2 = matrix(*lead, WIDTH, INNER, seed=2)
    if rank is not None:
        half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
        w1, w2, w3 = w1[..., half, :], w2[..., half], w3[..., half, :]
    return ExpertWeights(*(QuantTensor.dense(one.contiguous()) for one in (w1, w2, w3)))


def mixture(op: object, rank: int | None) -> Mixture:
    gate = QuantTensor.dense(matrix(EXPERT_COUNT, WIDTH, seed=4))
    router = Router(gate, torch.zeros(EXPERT_COUNT), False, 2, 1.5)
    x_TE = matrix(TOKENS, WIDTH, seed=5)
    parts = experts(rank, EXPERT_COUNT), experts(rank)
    return op(x_TE, TOKENS_T, router, *parts, 10.0)  # type: ignore[operator]


def test_the_given_experts_compute_and_the_own_ones_are_kept() -> None:
    followed = FollowedChoices(GIVEN_TP, None)
    found = mixture(followed.ops.moe, None)
    own = mixture(moe, None)
    assert torch.equal(found.ids_TP, GIVEN_TP)
    assert not torch.equal(own.ids_TP, GIVEN_TP)
    assert not torch.equal(found.y_TE, own.y_TE)
    assert torch.equal(followed.own()[EXPERTS], own.ids_TP)


@pytest.mark.parametrize("wrong", [[1, 1], [0, EXPERT_COUNT], [-1, 3]])
def test_ids_that_name_no_experts_are_not_followed(wrong: list[int]) -> None:
    given_TP = GIVEN_TP.clone()
    given_TP[3] = torch.tensor(wrong)
    found = mixture(FollowedChoices(given_TP, None).ops.moe, None).ids_TP
    assert torch.equal(found[3], mixture(moe, None).ids_TP[3])
    others = [0, 1, 2, 4]
    assert torch.equal(found[others], GIVEN_TP[others])


def test_another_number_of_experts_is_not_followed() -> None:
    followed = FollowedChoices(torch.tensor([[0, 1, 2]]).repeat(TOKENS, 1), None)
    assert torch.equal(mixture(followed.ops.moe, None).ids_TP, mixture(moe, None).ids_TP)


def test_ranks_follow_the_same_choices() -> None:
    """Their parts are added unrounded."""
    whole = mixture(FollowedChoices(GIVEN_TP, None).ops.moe, None)
    meeting = Meeting(2)
    tables = [RankOps(FollowedChoices(GIVEN_TP, None).ops, meeting, rank) for rank in range(2)]
    found = meeting.run(
        [
            lambda rank=rank, table=table: mixture(table.moe, rank)
            for rank, table in enumerate(tables)
        ]
    )
    for one in found:
        assert torch.equal(one.ids_TP, GIVEN_TP)
        torch.testing.assert_close(one.y_TE, whole.y_TE, rtol=1e-4, atol=1e-4)
        assert torch.equal(one.y_TE, found[0].y_TE)
