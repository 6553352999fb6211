"""Lists whose tiles the ranks share, executed on the CPU: what all ranks push is gathered by the
product of the first one, and faults that are planted are seen.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode, gathered_rows, linear
from dsv4.ops.linear.gathered_rows import GatheredRows
from dsv4.ops.linear.row_list import PackedRows, pack_rows, packed_rows
from dsv4.peers import InboxLayout
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import normal
from tests.ops.exchange.one_inbox import CPU, SOON, ranks_of_one_inbox
from tests.ops.linear.normal_weight import normal_weight
from tests.ops.linear.test_decode_linear_ptx import assert_product
from tests.ops.linear.test_later_tiles_ptx import normalised
from tests.ptx.faults import Deadlock, OutOfBounds, Trap
from tests.ptx.nvrtc import SourceEdit, run_recorded
from tests.ptx.schedule import SCHEDULES

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
NVFP4 = QuantFormat.NVFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
COLUMNS = 256
STEP = 5
BLOCKS = 8
# (formats and rows of the list, ranks, tokens): two formats, more ranks than tiles of one of them,
# ranks that have tiles in common, and a first product in the second format whose rows are no
# multiple of 8.
LISTS = [
    ([(FP8, 80), (FP8, 40), (BF16, 72), (BF16, 24)], 2, 1),
    ([(NVFP4, 64), (NVFP4, 32), (BF16, 24)], 8, 3),
    ([(BF16, 48), (BF16, 16), (BF16, 24), (BF16, 8), (BF16, 64)], 8, 8),
    ([(BF16, 76), (FP8, 64)], 2, 6),
]
FAULTS = {
    "words of both formats lie in each other": SourceEdit(
        "decode_products.cuh", "p.second.begin - p.first.tiles", "p.second.begin"
    ),
    "tiles that ranks have in common are looked for elsewhere": SourceEdit(
        "gathered_rows.cuh", "min(rank * share, tiles - share)", "rank * share"
    ),
    "all products are the first one": SourceEdit("gathered_rows.cuh", "m < matrices", "m < 1"),
    "all tokens are the first one": SourceEdit(
        "gathered_rows.cuh", "at.rank, TILE_ROWS, values", "at.rank, 0, values"
    ),
}


@pytest.fixture(autouse=True)
def _share_small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_rows, "LEAST_SAVED", 0)


class Ranks:
    """Ranks that all push into one inbox, in one piece of memory with all that they reach."""

    def __init__(
        self,
        formats: list[tuple[QuantFormat, int]],
        ranks: int,
        tokens: int,
        queries: tuple[int, int] = (40, 24),
    ) -> None:
        self.ranks = ranks_of_one_inbox(InboxLayout(ranks, 512, ranks), tokens, STEP)
        self.tokens = tokens
        self.x = normal(tokens, COLUMNS, seed=1).bfloat16()
        self.inputs = [normal_weight(format, rows, COLUMNS) for format, rows in formats]
        self.dtypes = [torch.bfloat16, *[torch.float32] * (len(formats) - 1)]
        low_rank = formats[0][1]
        self.norm = torch.ones(low_rank)
        self.queries = [normal_weight(FP8, rows, low_rank) for rows in queries]

    @property
    def listed(self) -> PackedRows:
        return replace(packed_rows(pack_rows(self.inputs, self.dtypes)), gathered=True)

    @property
    def packed_queries(self) -> PackedRows:
        packed = packed_rows(pack_rows(self.queries, [torch.bfloat16] * 2))
        return replace(packed, for_choice=1)

    def record(self, rank: int) -> tuple[GatheredRows, Launch, Launch]:
        recording = Recording(
            Target(CPU, ARCHITECTURE, BLOCKS), self.tokens, None, self.ranks[rank]
        )
        coming, *_ = decode.linear_rows(recording, self.x, self.listed)
        assert isinstance(coming, GatheredRows)
        decode.linear_rows(recording, coming, self.packed_queries, self.norm, 1e-6)
        push, gather = recording.items
        assert isinstance(push, Launch)
        assert isinstance(gather, Launch)
        return coming, push, gather

    def push(self, rank: int, schedule: str = "random", edit: SourceEdit | None = None) -> None:
        _, launch, _ = self.record(rank)
        tensors = {"peers": self.ranks[rank].table_P}
        run_recorded(launch, ARCHITECTURE, tensors, self.tokens, SCHEDULES[schedule], edit=edit)

    def gather(
        self, schedule: str = "random", edit: SourceEdit | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The products of the list and of the queries: NaN where nothing is stored."""
        coming, _, launch = self.record(0)
        found = torch.full(tuple(coming.memory.shape), torch.nan)
        size = -(-self.tokens * self.packed_queries.bytes_per_token // 4)
        queries = torch.full((size,), torch.nan)
        tensors = {
            "peers": self.ranks[0].table_P,
            "gathered_memory": found,
            "x": found,
            "y": queries,
        }
        run_recorded(launch, ARCHITECTURE, tensors, self.tokens, SCHEDULES[schedule], edit=edit)
        return (
            coming.rows.products(found, self.tokens),
            self.packed_queries.products(queries, self.tokens),
        )

    def check(self, found: tuple[Tensor, ...], queries: tuple[Tensor, ...]) -> None:
        for product, weight in zip(found, self.inputs, strict=True):
            assert_product(product, linear(self.x, weight, product.dtype))
        for product, weight in zip(queries, self.queries, strict=True):
            assert_product(product, linear(normalised(found[0]), weight))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("listed", "schedule"),
    [*((0, schedule) for schedule in SCHEDULES), (1, "random"), (2, "random"), (3, "random")],
)
def test_the_products_of_all_ranks_are_those_of_one(listed: int, schedule: str) -> None:
    room = Ranks(*LISTS[listed])
    for rank in range(len(room.ranks)):
        room.push(rank, schedule)
    room.check(*room.gather(schedule))


def test_few_blocks_store_more_products_than_they_have_threads() -> None:
    room = Ranks([(BF16, 76), (FP8, 256)], 2, 8, queries=(16, 8))
    _, _, launch = room.record(0)
    assert launch.shape.grid[0] * launch.shape.threads < room.tokens * (76 + 256)
    for rank in range(2):
        room.push(rank)
    room.check(*room.gather())


@pytest.mark.parametrize("missing", range(2))
def test_every_rank_is_waited_for(missing: int) -> None:
    formats, ranks, tokens = LISTS[0]
    room = Ranks(formats, ranks, tokens)
    for rank in range(ranks):
        if rank != missing:
            room.push(rank)
    with pytest.raises(Deadlock):
        room.gather()


@pytest.mark.parametrize("missing", range(2))
def test_the_host_is_told_whose_words_are_missing(missing: int) -> None:
    room = Ranks(*LISTS[0])
    room.push(1 - missing)
    with pytest.raises(Trap):
        room.gather(edit=SOON)
    coming, *_ = room.record(0)
    assert room.ranks[0].fault_4.tolist() == [1, coming.exchange, missing, STEP]


def run_all(room: Ranks, edit: SourceEdit) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    for rank in range(len(room.ranks)):
        room.push(rank, edit=edit)
    return room.gather(edit=edit)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    formats, ranks, tokens = LISTS[2 if "in common" in fault else 3]
    room = Ranks(formats, ranks, tokens)
    with pytest.raises((AssertionError, OutOfBounds, Deadlock)):
        room.check(*run_all(room, FAULTS[fault]))
