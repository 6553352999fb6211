"""Which lists the ranks share, and how: every tile is some rank's, all ranks launch the same, and
what they push fits into the inbox.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.ops.linear import decode, gathered_rows
from dsv4.ops.linear.decode_plan import ProductShape, plan_linear, plan_share
from dsv4.ops.linear.decode_product import TileShare
from dsv4.ops.linear.gathered_rows import GatheredRows
from dsv4.ops.linear.row_list import PackedRows, pack_rows
from dsv4.peers import InboxLayout, Peers
from dsv4.weights.packed import TILE_ROWS
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import activations, stored
from tests.ops.recorded import HOPPER

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
COLUMNS = 4096
# Input rows of a CSA layer of Flash.
CSA = [(FP8, 1024), (FP8, 512), *((BF16, rows) for rows in (1024, 1024, 256, 256, 64))]
# What a rank of four pushes of them.
FITTING = sum(rows for _, rows in CSA) // 4


def listed(formats: list[tuple[QuantFormat, int]], gathered: bool = True) -> PackedRows:
    weights = [stored(format, rows, COLUMNS) for format, rows in formats]
    packed = pack_rows(weights, [None, None, *[torch.float32] * (len(formats) - 2)])
    return replace(packed, gathered=gathered)


def recording(rank: int, ranks: int, tokens: int = 1, width: int = COLUMNS) -> Recording:
    peers = Peers.planned(rank, InboxLayout(ranks, width, 16), 512) if ranks > 1 else None
    return Recording(HOPPER, tokens, None, peers)


def launches(found: Recording) -> list[Launch]:
    return [item for item in found.items if isinstance(item, Launch)]


@given(tiles=st.tuples(st.integers(1, 300), st.integers(1, 300)), ranks=st.sampled_from((2, 4, 8)))
def test_every_tile_is_some_rank_s(tiles: tuple[int, int], ranks: int) -> None:
    shares = [TileShare.of(tiles, rank, ranks) for rank in range(ranks)]
    assert len({share.tiles for share in shares}) == 1
    for part, count in enumerate(tiles):
        own = shares[0].tiles[part]
        firsts = [share.first_tiles[part] for share in shares]
        assert own * ranks >= count > own * (ranks - 1) - ranks
        assert {tile for first in firsts for tile in range(first, first + own)} == set(range(count))
        # Who gathers looks for a tile at the rank of this number.
        for tile in range(count):
            first = firsts[tile // own]
            assert first <= tile < first + own


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_what_is_pushed_is_gathered_from_the_same_words(
    ranks: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered_rows, "LEAST_SAVED", 0)
    for rank in range(ranks):
        found = recording(rank, ranks, tokens)
        x = activations(found, COLUMNS)
        coming, *others = decode.linear_rows(found, x, listed(CSA))
        assert isinstance(coming, GatheredRows)
        queries = pack_rows([stored(FP8, 8192, 1024)], [None])
        decode.linear_rows(found, coming, queries, torch.empty(1024, device="meta"), 1e-6)
        push, gather = launches(found)
        layout = found.peers.layout if found.peers else None
        assert layout is not None
        assert push.arguments["slot"] == layout.rows_slot + rank * layout.rank_words
        assert gather.arguments["slot"] == layout.rows_slot
        assert push.arguments["exchange"] == gather.arguments["exchange"] == coming.exchange
        share = TileShare.of((96, 164), rank, ranks)
        assert (push.arguments["tiles0"], push.arguments["tiles1"]) == share.tiles
        assert sum(share.tiles) * TILE_ROWS * 8 <= layout.rank_words
        # The products lie where the second launch writes them.
        memory = gather.arguments["gathered_memory"]
        assert memory is coming.memory
        assert push.arguments["y"] is None
        assert [tuple(product.shape) for product in (coming.product, *others)] == [
            (tokens, rows) for _, rows in CSA
        ]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (listed(CSA), recording(0, 1)),
        (listed(CSA, gathered=False), recording(0, 8)),
        # 7.3 MB and 9.2 MB saved.
        (listed([*CSA[:2], (BF16, 512), (BF16, 512)]), recording(0, 2)),
        (listed([*CSA[:2], (BF16, 512)]), recording(0, 8)),
        # Two launches, more words than an inbox has room for, and a first product of too many
        # columns for the threads.
        (listed([*CSA, (NVFP4, 8192)]), recording(0, 8)),
        (listed(CSA), recording(0, 4, width=FITTING - 1)),
        (listed([(FP8, 4160), *CSA[1:]]), recording(0, 8)),
    ],
    ids=[
        "one rank",
        "not to be shared",
        "two ranks",
        "few bytes",
        "three formats",
        "small inbox",
        "wide x",
    ],
)
def test_other_lists_are_multiplied_by_every_rank(rows: PackedRows, found: Recording) -> None:
    x = activations(found, COLUMNS)
    products = decode.linear_rows(found, x, rows)
    assert all(isinstance(product, torch.Tensor) for product in products)
    for launch in launches(found):
        assert launch.arguments["peers"] is None
        assert {"SHARES", "GATHERS"}.isdisjoint(dict(launch.shape.kernel.defines))


def test_words_may_fill_an_inbox() -> None:
    found = recording(0, 4, width=FITTING)
    coming, *_ = decode.linear_rows(found, activations(found, COLUMNS), listed(CSA))
    assert isinstance(coming, GatheredRows)


def test_words_are_not_multiplied_by_two_launches() -> None:
    found = recording(0, 8)
    x = activations(found, COLUMNS)
    coming, *_ = decode.linear_rows(found, x, listed(CSA))
    queries = pack_rows([stored(one, 64, 1024) for one in (FP8, NVFP4, BF16)], [None] * 3)
    expected = "expected 1 and a norm for words of ranks"
    with pytest.raises(ValueError, match=f"rows: found 2 launches and a norm, {expected}"):
        decode.linear_rows(found, coming, queries, torch.empty(1024, device="meta"), 1e-6)
    with pytest.raises(ValueError, match=f"rows: found 1 launches and no norm, {expected}"):
        decode.linear_rows(found, coming, pack_rows([stored(FP8, 64, 1024)], [None]))


def test_few_tiles_share_k_and_many_do_not() -> None:
    """By the busiest block: a quarter of a tile, half of one, one; half of one also by clusters of
    four.
    """
    for tiles, cluster in (((16, 8), 4), ((40, 26), 2), ((48, 82), 1), ((16, 17), 4)):
        shape = ProductShape((FP8, BF16), tiles, COLUMNS)
        assert plan_share(shape, 1, HOPPER).cluster == cluster
        assert plan_linear(shape, 1, HOPPER).cluster == 1


@pytest.mark.parametrize("tiles", [(16, 8), (16, 21), (48, 82), (96, 64)])
@pytest.mark.parametrize("columns", [4096, 7168, 16384])
def test_k_is_shared_alike_for_every_number_of_tokens(tiles: tuple[int, int], columns: int) -> None:
    shape = ProductShape((FP8, BF16), tiles, columns)
    plans = [plan_share(shape, tokens, HOPPER) for tokens in range(1, 9)]
    assert len({(plan.cluster, plan.turns, plan.clusters) for plan in plans}) == 1
