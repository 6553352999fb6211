"""The kernels of acceptance against the torch ops on the same logits, at the real vocabulary's size
and at others.
"""

import pytest
import torch
from torch import Tensor

from dsv4.ops import acceptance as reference
from dsv4.ops.acceptance import KEPT, cuda
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.sampling import NAN_TOKEN, sample_token
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager

pytestmark = pytest.mark.gpu

SIZES = [7, 256, 4097, 129_280]
# (temperature, top_p, min_p, top_k)
SETTINGS = [
    (0.0, 1.0, 0.0, 0),
    (1.0, 1.0, 0.0, 0),
    (0.7, 0.9, 0.0, 0),
    (1.3, 1.0, 0.02, 0),
    (1.0, 0.95, 0.01, 50),
]


class Case:
    """Logits of a block, drafts drawn from those of the module, everything on the CPU."""

    def __init__(self, size: int, count: int, settings: tuple[float, ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits_MV = 3 * torch.randn((count + 1, size), generator=generator)
        noise = torch.randn((count, size), generator=generator)
        self.draft_logits_NV = self.logits_MV[:count] + 0.7 * noise
        self.settings_4 = torch.tensor(settings)
        self.seed_1 = torch.tensor([seed * 7919 + 2**40])
        self.position_1 = torch.tensor([1000 + 11 * seed])
        first = int(self.position_1) - count
        self.drafts_N = torch.stack(
            [
                sample_token(row, self.settings_4, self.seed_1, torch.tensor([first + index]))
                for index, row in enumerate(self.draft_logits_NV)
            ]
        )

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.logits_MV,
            self.draft_logits_NV,
            self.drafts_N,
            self.settings_4,
            self.seed_1,
            self.position_1,
        )

    def on_gpu(self) -> list[Tensor]:
        return [tensor.cuda() for tensor in self.arguments]


def found(case: Case) -> list[int]:
    return immediately(cuda.judge_drafts)(*case.on_gpu(), tokens=1).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_replacements_are_those_of_the_torch_op(size: int, settings: tuple[float, ...]) -> None:
    replacements = []
    for seed in range(12):
        case = Case(size, 1 + seed % 7, settings, seed)
        expected = reference.judge_drafts(*case.arguments).tolist()
        assert found(case) == expected, seed
        replacements += expected
    if size > 7:
        assert 0 < replacements.count(KEPT) < len(replacements)


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_without_a_draft_are_drawn_as_any_token(settings: tuple[float, ...]) -> None:
    case = Case(4097, 5, settings, 3)
    case.drafts_N[2:] = -1
    expected = reference.judge_drafts(*case.arguments).tolist()
    assert KEPT not in expected[2:]
    assert found(case) == expected


def test_rows_without_a_distribution_say_so() -> None:
    for settings in SETTINGS:
        case = Case(4097, 4, settings, 5)
        case.logits_MV[0, 7] = torch.nan
        case.logits_MV[2, 4000] = torch.inf
        replacements = found(case)
        assert replacements == reference.judge_drafts(*case.arguments).tolist()
        assert (replacements[0], replacements[2]) == (NAN_TOKEN, NAN_TOKEN)


def test_replay_is_the_eager_call() -> None:
    case = Case(129_280, 5, SETTINGS[2], 1)
    prepared = PreparedOp(cuda.judge_drafts, *case.on_gpu(), tokens=1)
    prepared.run()
    assert_no_synchronisation(prepared.run)
    assert_replay_is_eager(prepared.run)


@pytest.mark.parametrize("met_nan", [0, 1])
@pytest.mark.parametrize(
    ("replacements", "drafts"),
    [
        ([], []),
        ([KEPT], [9]),
        ([4], [9]),
        ([KEPT, KEPT, 6], [9, 8, 7]),
        ([5, KEPT, KEPT], [9, 8, 7]),
        ([KEPT, 3, KEPT], [9, -1, -1]),
        ([KEPT, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT], [9, 8, 7, 6, 5, 4, 3]),
        ([KEPT, NAN_TOKEN], [9, 8]),
    ],
)
@pytest.mark.parametrize("behind", [77, NAN_TOKEN])
def test_blocks_are_settled_as_by_the_torch_op(
    replacements: list[int], drafts: list[int], behind: int, met_nan: int
) -> None:
    results = []
    for device in ("cpu", "cuda"):
        ring_3R = torch.full((3, 32), -9, dtype=torch.int64, pin_memory=device == "cuda")
        nan_1 = torch.tensor([met_nan], dtype=torch.int32)
        nan_1 = nan_1.pin_memory() if device == "cuda" else nan_1
        rejected_1, next_1 = (torch.tensor([-9], device=device) for _ in range(2))
        position_1 = torch.tensor([61 + len(drafts)], device=device)
        given = torch.tensor(behind, device=device)
        block = [
            torch.tensor(of, dtype=torch.int64, device=device) for of in (replacements, drafts)
        ]
        judged = (block[0], block[1]) if drafts else None
        settled = (judged, given, (position_1, rejected_1), next_1, ring_3R, nan_1)
        if device == "cpu":
            reference.settle_block(*settled)
        else:
            immediately(cuda.settle_block)(*settled, tokens=1)
            torch.cuda.synchronize()
        results.append([ring_3R.tolist(), rejected_1.tolist(), next_1.tolist()])
    assert results[0] == results[1]


def test_drafts_that_are_none_enter_as_a_token_that_exists() -> None:
    drafts_N = torch.tensor([5, -1, 7], device="cuda")
    tokens_N = torch.zeros(3, dtype=torch.int64, device="cuda")
    immediately(cuda.enter_drafts)(drafts_N, tokens_N)
    assert tokens_N.tolist() == [5, 0, 7]
