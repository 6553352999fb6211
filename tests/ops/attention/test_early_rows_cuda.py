"""Rows of earlier steps are read before the kernel in front has ended, those of this step behind
it: attention and index scores behind the launch that writes what they read, with NaN there before.
"""

import pytest
import torch
from torch import Tensor

from dsv4.bench.device import capture
from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache
from dsv4.launch.recording import Recording
from dsv4.ops.attention import decode as attention
from dsv4.ops.immediate import PreparedOp
from dsv4.ops.indexer import decode as indexer
from dsv4.ops.linear import decode as linear
from dsv4.ops.linear.bench import random_weight
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.prepare_attention import Queries
from dsv4.ops.prepare_attention import decode as prepare
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import normal
from tests.ops.prepare_attention.cases import RATIOS, Step, step

pytestmark = pytest.mark.gpu

WINDOW = 128
SELECTED = 512
NAN = 0xFF
PRODUCTS = 16


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


class Layer:
    """Attention, or the choice of entries, of a step whose rows ``prepare_attention`` writes."""

    def __init__(self, case: Step, chooses: bool, drafts: bool) -> None:
        self.case = case
        self.chooses = chooses
        self.drafts = drafts
        tokens, heads, _ = case.queries.q_THD.shape
        self.sink_H = normal(heads, seed=30)
        self.weight_TI = normal(tokens, 64, seed=31)
        weight = random_weight(16, 1 << 15, QuantFormat.BF16)
        self.product = (
            normal(1, 1 << 15, seed=32, dtype=torch.bfloat16),
            pack_rows([weight], [None]),
        )

    def behind(self, recording: Recording, queries: Queries) -> Tensor:
        case = self.case
        if self.chooses:
            keys = case.compressions[1].state.rows
            assert queries.index_TID is not None
            positions_T = case.positions_T
            return indexer.index_select(
                recording, queries.index_TID, self.weight_TI, 1.0, keys, positions_T, SELECTED
            )
        ratio = case.compressions[0].weights.ratio if case.compressions else 0
        entries = case.compressions[0].state.rows if case.compressions else None
        keys = KeySet(case.ring, entries, ratio, WINDOW)
        at = case.positions_T, case.norm.inv_freq
        if self.drafts:
            return attention.block_attention(recording, queries.q_THD, keys, self.sink_H, *at)
        return attention.sparse_attention(recording, queries.q_THD, keys, None, self.sink_H, *at)

    def whole(self, recording: Recording, *arguments: object) -> tuple[Queries, Tensor]:
        """Behind products of few blocks: they let what follows start at once, which then waits for
        them, but for what is read early.
        """
        for _ in range(PRODUCTS):
            linear.linear_rows(recording, *self.product)
        queries = prepare.prepare_attention(recording, *self.case.arguments())
        return queries, self.behind(recording, queries)

    def hide_new_rows(self) -> None:
        """NaN in every row that the step writes."""
        start = int(self.case.positions_T[0])
        end = start + len(self.case.positions_T)
        hide(self.case.ring, [position % self.case.ring.slots for position in range(start, end)])
        for part in self.case.compressions:
            ratio = part.weights.ratio
            hide(part.state.rows, list(range(start // ratio, end // ratio)))


def hide(rows: RowCache, slots: list[int]) -> None:
    for part in (rows.data, rows.block_scale):
        if part is not None and slots:
            part.view(torch.uint8).view(rows.slots, -1)[slots] = NAN


def check(case: Step, chooses: bool = False, drafts: bool = False) -> None:
    """In a graph, so that launches overlap. The bits are those of the second half behind all."""
    layer = Layer(case, chooses, drafts)
    op = PreparedOp(layer.whole, *case.arguments(), tokens=len(case.positions_T))
    graph = capture([op.run])
    for _ in range(5):
        layer.hide_new_rows()
        queries, found = op.result
        found.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        right = PreparedOp(layer.behind, queries).run()
        assert not found.isnan().any()
        assert torch.equal(found, right)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_attention_sees_the_rows_of_its_step(kind: str, quantised: bool, tokens: int) -> None:
    for start in (0, 1, 3, 120, 127, 128, 255, 1023, 1024):
        check(step(kind, start, tokens, 64, 64, quantised))


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_tokens_of_a_draft_block_see_each_other(tokens: int) -> None:
    for start in (0, 3, 127, 128, 1024):
        check(step("window", start, tokens, 64, 64), drafts=True)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("start", [128 * 1200 - 2, 128 * 2100 - 1, 128 * 8200 - 4])
def test_keys_in_several_tiles_and_of_several_clusters(tokens: int, start: int) -> None:
    check(step("hca", start, tokens, 64, 64))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_scores_see_the_keys_of_their_step(quantised: bool, tokens: int) -> None:
    for start in (2300, 2303, 8191, 65_535, 400_003):
        check(step("csa", start, tokens, 64, 64, quantised), chooses=True)
