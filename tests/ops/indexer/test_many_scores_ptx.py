"""Index scores of many tokens by wgmma, executed on the CPU: the same bits as by mma."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowFormat
from dsv4.launch.items import Launch
from dsv4.ops.indexer import prefill, selection_shapes
from tests.ops.cases import normal
from tests.ops.indexer.drawn import drawn_keys
from tests.ops.indexer.meta import WIDTH, selection
from tests.ops.recorded import HOPPER, launches
from tests.ptx.nvrtc import SourceEdit, run_recorded
from tests.shared_results import shared

pytestmark = pytest.mark.slow

SLOTS = 660
TOPK = 64
# The last item of eight tokens has three. As few as the other kernel takes.
TOKENS = 67
FEW = 12
FAULTS = {
    "queries of the first pair of tokens": SourceEdit(
        "index_scores_sm90.cu", "product * COLUMN_TOKENS + token, tokens - 1", "token, tokens - 1"
    ),
    "the halves of a query change places": SourceEdit(
        "index_scores_sm90.cu", "[i / 2][column]", "[1 - i / 2][column]"
    ),
    "factors of another token": SourceEdit(
        "index_scores_sm90.cu", "(shared.factors[token] +", "(shared.factors[token ^ 1] +"
    ),
    "every second tile": SourceEdit(
        "index_scores_sm90.cu", "stride = parts * GROUPS", "stride = 2 * parts * GROUPS"
    ),
    "scales of the keys behind": SourceEdit(
        "index_scores_sm90.cu", "const float scale = keys.scale;", "const float scale = 1.0f;"
    ),
}


class Scores:
    """Orders of the scores of ``TOKENS`` tokens, some of which see too few entries to be scored."""

    def __init__(self) -> None:
        self.keys = drawn_keys(SLOTS)
        self.q_TID = normal(TOKENS, 64, WIDTH, seed=1, dtype=torch.bfloat16)
        self.weight_TI = normal(TOKENS, 64, seed=2)
        # Most of them see few entries, the last one more than the warps of two parts take at once.
        self.positions_T = torch.arange(TOKENS) ** 2 * 37 // TOKENS + 100

    def orders(self, start: int, tokens: int, edit: SourceEdit | None = None) -> tuple[str, Tensor]:
        """The kernel, and int32 ``[tokens, SLOTS]``; −1: not written."""
        launch = recorded(tokens)
        score_TS = torch.full((tokens, SLOTS), -1, dtype=torch.int32)
        chosen = slice(start, start + tokens)
        assert self.keys.block_scale is not None
        tensors = {
            "q": self.q_TID[chosen],
            "weights": self.weight_TI[chosen],
            "data": self.keys.data,
            "scales": self.keys.block_scale,
            "positions": self.positions_T[chosen],
            "scores": score_TS,
            "nan": torch.zeros(1, dtype=torch.int32),
        }
        run_recorded(launch, "sm_90a", tensors, tokens, edit=edit)
        return launch.shape.kernel.function, score_TS


def orders_of_all() -> tuple[str, Tensor]:
    """Those of all tokens, for the first test that asks and for all others."""
    return shared(("index scores of many tokens", TOKENS), lambda: Scores().orders(0, TOKENS))


def recorded(tokens: int) -> Launch:
    arguments = selection(tokens, SLOTS, 64, RowFormat.INDEX_FP8)._replace(index_topk=TOPK)
    target = dataclasses.replace(HOPPER, multiprocessors=5)
    scores, _ = launches(prefill.index_select, *arguments, tokens=tokens, target=target)
    return scores


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's entries are shared by up to two items."""
    monkeypatch.setattr(selection_shapes, "_MANY_PART_TILES", 2)


def test_the_same_bits_as_of_few_tokens() -> None:
    case = Scores()
    function, found_TS = orders_of_all()
    assert function == "index_scores_sm90"
    # The first and the last ones, and some of all four pairs of a block's tokens.
    for start in (0, 26, TOKENS - FEW):
        function, expected_TS = case.orders(start, FEW)
        assert function == "index_scores"
        assert torch.equal(found_TS[start : start + FEW], expected_TS)
    assert bool((found_TS != -1).any())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    _, expected_TS = orders_of_all()
    _, found_TS = Scores().orders(0, TOKENS, FAULTS[fault])
    assert not torch.equal(found_TS, expected_TS)
