"""Row lists that the ranks share in a decode step: each multiplies some row tiles, whose words it
pushes to all, and the kernel that multiplies the first product gathers them
(``gathered_rows.cuh``).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.exchange.words import Words, incoming_rows, outgoing_rows
from dsv4.ops.linear.decode_product import (
    NO_NORM,
    Norm,
    Product,
    TileShare,
    list_memory,
    record_product,
)
from dsv4.ops.linear.row_list import PackedRows
from dsv4.weights.packed import TILE_ROWS

# Columns of the first product that threads hold, whatever the number of tokens (decode_plan.py).
_MOST_COLUMNS = 4096
# Bytes that a rank has to be spared: what an H200 reads in the most time that the way of the words
# takes (docs/tensor_parallel.md#the-input-rows). The rule knows no number of tokens, so that a
# token has the same bits in all of them.
LEAST_SAVED = 10_700_000


@dataclass(frozen=True)
class GatheredRows:
    """The first product of a row list, on its way as words with all others: ``linear_rows`` of it
    puts all of them into ``memory``. ``exchange``: the number of the words.
    """

    rows: PackedRows
    memory: Tensor
    tokens: int
    exchange: int

    @property
    def product(self) -> Tensor:
        """Where the first product will be."""
        return self.rows.products(self.memory, self.tokens)[0]


def is_worth_sharing(nbytes: int, ranks: int) -> bool:
    """Whether ``ranks`` share a list of so many bytes."""
    return nbytes * (ranks - 1) >= LEAST_SAVED * ranks


def share_of_tiles(recording: Recording, rows: PackedRows) -> TileShare | None:
    """This rank's tiles of a list; None where every rank multiplies all of them."""
    peers = recording.peers
    if peers is None or not rows.gathered or len(rows.launches) != 1:
        return None
    (launch,) = rows.launches
    if not is_worth_sharing(launch.nbytes, peers.ranks):
        return None
    share = TileShare.of(launch.shape.tiles, peers.rank, peers.ranks)
    words = sum(share.tiles) * TILE_ROWS * MAX_DECODE_TOKENS
    fits = words <= peers.layout.rank_words and rows.weights[0].shape[0] <= _MOST_COLUMNS
    return share if fits else None


def push_share(
    recording: Recording, x: Tensor, rows: PackedRows, share: TileShare
) -> tuple[Any, ...]:
    """The products of a list as ``linear_rows`` returns them, of which this rank computes its
    share.
    """
    launch = rows.launches[0]
    tokens = x.shape[0]
    memory = list_memory(recording, rows, tokens)
    words, number = outgoing_rows(recording)
    product = Product.of_list(rows, launch, recording).shared(share)
    record_product(recording, product, x.unsqueeze(1), NO_NORM, None, words)
    coming = GatheredRows(rows, memory, tokens, number)
    return (coming, *rows.products(memory, tokens)[1:])


def multiply_gathered(
    recording: Recording, x: GatheredRows, rows: PackedRows, norm: Norm
) -> tuple[Tensor, ...]:
    """The products of what comes from all ranks, by a launch that gathers it."""
    if len(rows.launches) != 1 or norm.weight is None:
        found = f"{len(rows.launches)} launches and {'no' if norm.weight is None else 'a'} norm"
        raise ValueError(f"rows: found {found}, expected 1 and a norm for words of ranks")
    launch = rows.launches[0]
    memory = list_memory(recording, rows, x.tokens)
    product = Product.of_list(rows, launch, recording)
    record_product(
        recording, product, x.product.unsqueeze(1), norm, memory, _gathering(recording, x)
    )
    return rows.products(memory, x.tokens)


def _gathering(recording: Recording, coming: GatheredRows) -> Words:
    """What the launch gets that gathers, which is recorded next."""
    words = incoming_rows(recording, coming.exchange)
    launch = coming.rows.launches[0]
    tiles = (*launch.shape.tiles, 0)
    arguments = {
        "gathered_table": launch.table,
        "gathered_matrices": launch.table.shape[0],
        "gathered_tiles0": tiles[0],
        "gathered_tiles1": tiles[1],
        "x_tile": coming.rows.first_tile(launch),
        "gathered_memory": coming.memory,
    }
    return Words((*words.defines, ("GATHERS", 1)), {**words.arguments, **arguments})
