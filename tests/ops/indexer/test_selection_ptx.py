"""Index scores and top-k of a decode step, executed on the CPU: scores from the right codes, lists
of many kinds of scores, and what faults that are planted change.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowFormat, pack_index_rows, unpack_index_rows
from dsv4.launch.items import Launch
from dsv4.ops.indexer import decode
from tests.ops.cases import normal
from tests.ops.indexer.drawn import drawn_keys
from tests.ops.indexer.meta import WIDTH, selection
from tests.ops.recorded import HOPPER, launches
from tests.ptx.nvrtc import SourceEdit, run_recorded

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
FP8 = RowFormat.INDEX_FP8
SCALE = 0.5
FAULTS = {
    "quotients are products with the reciprocal": SourceEdit(
        "index_products.cuh",
        "return fmaf(fmaf(-quotient, scale, value), reciprocal, quotient);",
        "return quotient;",
    ),
    "reciprocals of all scales are taken as they are": SourceEdit(
        "index_products.cuh",
        "divisor < 0x1p-60f ? 0x1p64f : divisor > 0x1p60f ? 0x1p-64f : 1.0f",
        "1.0f",
    ),
}
IN_ONE_BLOCK = {
    "the last of the few is not ranked": SourceEdit("top_k.cuh", "== wanted - 1", "== 0"),
    "the few are left out": SourceEdit("top_k_held.cuh", "if (bin[place] == last)", "if (false)"),
    "strips lie behind each other": SourceEdit(
        "top_k_held.cuh", "list += all[group] >>", "all[group] >>"
    ),
}
IN_A_CLUSTER = {
    "the few before a block are not counted": SourceEdit(
        "top_k_held.cuh", "list += few_before(", "list += 0 * few_before("
    ),
    "what is above in blocks before is not counted": SourceEdit(
        "top_k_held.cuh", "if (spread) list += shared.above_before;", ""
    ),
}


def orders(score_S: Tensor) -> Tensor:
    """int64: larger for a larger score, as index_scores writes it; NaN above all."""
    bits = (score_S + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    order_S = torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))
    return order_S.masked_fill(score_S.isnan(), 0xFFFFFFFF)


def listed(score_S: Tensor, topk: int, slots: int, edit: SourceEdit | None = None) -> Tensor:
    """What ``top_k_tokens`` lists of a token that sees these scores."""
    return selecting(score_S, topk, slots, edit)[0]


def selecting(
    score_S: Tensor, topk: int, slots: int, edit: SourceEdit | None = None
) -> tuple[Tensor, int]:
    """What ``top_k_tokens`` lists of such a token, and its warp instructions."""
    visible = len(score_S)
    arguments = selection(1, slots)._replace(index_topk=topk)
    _, launch = launches(decode.index_select, *arguments, tokens=1)
    # Behind the scores are words that nothing may read.
    order_S = torch.full((int(str(launch.arguments["stride"])),), -1, dtype=torch.int32)
    found = orders(score_S)
    order_S[:visible] = torch.where(found >= 1 << 31, found - (1 << 32), found).int()
    out_K = torch.full((topk,), -7, dtype=torch.int64)
    position = torch.tensor([4 * visible - 1])
    tensors = {"orders": order_S, "positions": position, "out": out_K}
    instructions = run_recorded(launch, ARCHITECTURE, tensors, 1, edit=edit)
    return out_K, instructions


def best(score_S: Tensor, topk: int) -> Tensor:
    score_S = score_S.nan_to_num(torch.inf, torch.inf, -torch.inf)
    return score_S.sort(descending=True, stable=True).indices[:topk].sort().values


def scores(kind: str, entries: int) -> Tensor:
    value_S = normal(entries, seed=entries)
    entry = torch.arange(entries)
    kinds = {
        "normal": value_S * 3 + 1,
        "few values": (value_S * 2).round(),
        "equal neighbours": (value_S * 60).round(),
        "zeros": value_S.where(entry % 13 == 0, 0.0).abs(),
        "rising": entry / 7.0,
        "infinite": value_S.where(entry != 77, torch.inf),
        "nan": value_S.where(entry % 1000 != 77, torch.nan),
    }
    return kinds[kind]


KINDS = ["normal", "few values", "equal neighbours", "zeros", "rising", "infinite", "nan"]
NUMBERS = pytest.mark.parametrize("slots", [9001, 17001], ids=["one block", "a cluster"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@NUMBERS
def test_lists_of_many_kinds_of_scores(slots: int, kind: str) -> None:
    score_S = scores(kind, slots - 1)
    assert torch.equal(listed(score_S, 512, slots), best(score_S, 512))


@NUMBERS
def test_orders_in_registers_take_fewer_instructions(slots: int) -> None:
    """Scores that can be counted in bins of equal width are."""
    score_S = scores("equal neighbours", slots - 1)
    from_memory = SourceEdit("top_k_held.cuh", "visible <= most &&", "false &&")
    out_K, instructions = selecting(score_S, 512, slots)
    other_K, others = selecting(score_S, 512, slots, from_memory)
    assert torch.equal(out_K, other_K)
    assert instructions < 0.8 * others


class Scored:
    """``index_scores`` of two tokens on three multiprocessors."""

    visible = 403
    tokens = 2
    slots = 420

    def __init__(self, format: RowFormat) -> None:
        self.keys = drawn_keys(self.slots, format)
        self.q_TID = normal(self.tokens, 64, WIDTH, seed=1, dtype=torch.bfloat16)
        self.weight_TI = normal(self.tokens, 64, seed=2)
        arguments = selection(self.tokens, self.slots, 64, format)._replace(index_topk=64)
        target = dataclasses.replace(HOPPER, multiprocessors=3)
        recorded = launches(decode.index_select, *arguments, tokens=self.tokens, target=target)
        self.launch: Launch = recorded[0]

    def error(self, edit: SourceEdit | None = None) -> float:
        """Of the scores of both tokens, relative to the largest; unseen entries have none."""
        stride = int(str(self.launch.arguments["score_stride"]))
        score_TS = torch.full((self.tokens, stride), -1, dtype=torch.int32)
        last = 4 * self.visible - 1
        tensors: dict[str, Tensor] = {
            "q": self.q_TID,
            "weights": self.weight_TI,
            "data": self.keys.data,
            "positions": torch.tensor([last - 1, last]),
            "scores": score_TS,
            "nan": torch.zeros(1, dtype=torch.int32),
        }
        if self.keys.block_scale is not None:
            tensors["scales"] = self.keys.block_scale
        run_recorded(self.launch, ARCHITECTURE, tensors, self.tokens, edit=edit)
        queries, rows_SD = self.q_TID.float(), self.keys.read_all().double()
        if self.keys.format is FP8:
            queries = unpack_index_rows(*pack_index_rows(queries))
        worst = 0.0
        for t, visible in ((0, self.visible - 1), (1, self.visible)):
            assert bool((score_TS[t, visible:] == -1).all())
            order_S = score_TS[t, :visible].long() & 0xFFFFFFFF
            bits_S = torch.where(order_S >= 1 << 31, order_S - (1 << 31), -1 - order_S)
            found_S = bits_S.int().view(torch.float32)
            dots_IS = torch.relu(queries[t].double() @ rows_SD[:visible].T)
            expected_S = self.weight_TI[t].double() * SCALE @ dots_IS
            error = float((found_S - expected_S).abs().max() / expected_S.abs().max())
            worst = max(worst, error)
        return worst


def halfway() -> Scored:
    """Queries of which many values, over the scale, lie in the middle between two codes."""
    case = Scored(FP8)
    middle = (17 + 2 * torch.arange(8)) / 16
    for head in range(64):
        factor = (3, 5, 7)[head % 3] / 64
        row = torch.cat([middle * factor * 2.0**power for power in range(-4, 8)])
        row = torch.cat([row, torch.zeros(WIDTH - len(row))])
        row[-1] = 448 * factor
        assert torch.equal(row.bfloat16().float(), row)
        case.q_TID[:, head] = row
    return case


def small_and_large() -> Scored:
    """Queries whose scales have reciprocals or remainders beyond the range of float32."""
    case = Scored(FP8)
    case.q_TID[0] *= 2.0**-120
    case.weight_TI[0] *= 2.0**110
    case.q_TID[1] *= 2.0**100
    case.weight_TI[1] *= 2.0**-90
    case.q_TID[:, 5] = 0
    return case


@pytest.mark.parametrize("format", [FP8, RowFormat.PLAIN])
def test_scores_are_those_of_the_definition(format: RowFormat) -> None:
    assert Scored(format).error() < 1e-6


def test_every_query_gets_the_code_of_the_definition() -> None:
    assert halfway().error() < 1e-6
    assert small_and_large().error() < 1e-6


def test_planted_faults_are_seen() -> None:
    assert halfway().error(FAULTS["quotients are products with the reciprocal"]) > 1e-5
    fault = FAULTS["reciprocals of all scales are taken as they are"]
    assert not small_and_large().error(fault) < 1e-6


@pytest.mark.parametrize("fault", [*IN_ONE_BLOCK, *IN_A_CLUSTER])
def test_planted_faults_of_top_k_are_seen(fault: str) -> None:
    visible = 9000 if fault in IN_ONE_BLOCK else 17000
    score_S = scores("equal neighbours", visible)
    found_K = listed(score_S, 512, visible + 1, (IN_ONE_BLOCK | IN_A_CLUSTER)[fault])
    assert not torch.equal(found_K, best(score_S, 512))
