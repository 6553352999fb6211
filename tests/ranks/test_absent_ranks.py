"""Two or four ranks of more, for timings: what absent ones would send comes from the others."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dsv4 import EngineConfig
from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig
from dsv4.launch.constants import TOKEN_TILE
from dsv4.parallel.placement import Placement
from dsv4.parallel.rank_state import allocate_state, connect
from dsv4.peers import WORD_BYTES, InboxLayout, Peers

CPU = torch.device("cpu")
WIDTH = 8
LISTED = 16
ROW_BYTES = {"inputs": 2 * WIDTH, "chosen": 8 * LISTED}
# Ranks that are there, and all that the layers are cut for.
PRESENT = [(2, 4), (2, 8), (4, 8)]


def rows_of(peers: Peers, what: str) -> torch.Tensor:
    """What all ranks write rows of."""
    return {"inputs": peers.inputs_TE, "chosen": peers.chosen_TK}[what]


def rows_written(peers: Peers, what: str, tokens: int) -> list[int]:
    """Addresses of the rows that a rank's ``hc_finish`` or ``top_k_tokens`` writes."""
    ranks = peers.ranks
    own = [token for token in range(tokens) if token // TOKEN_TILE % ranks == peers.rank]
    first = {"inputs": 2 * ranks, "chosen": 3 * ranks}[what] + 3
    tables = peers.table_P[first : first + ranks].tolist()
    return [table + token * ROW_BYTES[what] for table in tables for token in own]


@pytest.mark.parametrize(("present", "ranks"), PRESENT)
def test_other_ranks_send_the_words_of_absent_ones(present: int, ranks: int) -> None:
    """Every inbox gets the words of every rank once, those of absent ones from all ranks but its
    own, which also read there what absent ones would have computed.
    """
    found = connect(InboxLayout(ranks, WIDTH, 64, LISTED), [CPU] * present, 1)
    rank_bytes = WORD_BYTES * found[0].layout.rank_words
    inboxes = [there.inbox.data_ptr() for there in found]
    partials = [there.partials_STE.data_ptr() for there in found]
    senders: dict[int, list[int]] = {}
    for one in found:
        table = one.table_P.tolist()
        read = table[ranks + 3 : 2 * ranks + 3]
        assert read[:present] == partials
        for address, rows in zip(table[:ranks], read, strict=True):
            senders.setdefault(address + one.rank * rank_bytes, []).append(one.rank)
            assert rows in partials
        assert partials[one.rank] not in read[present:]
    assert senders.keys() == {at + rank * rank_bytes for at in inboxes for rank in range(ranks)}
    assert all(len(ranks_there) == 1 for ranks_there in senders.values())
    for own, inbox in enumerate(inboxes):
        of_absent = [senders[inbox + rank * rank_bytes] for rank in range(present, ranks)]
        assert [own] not in of_absent
        assert {rank for (rank,) in of_absent} == set(range(present)) - {own}


@pytest.mark.parametrize(("present", "ranks"), PRESENT)
@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("what", ROW_BYTES)
def test_rows_are_filled_for_the_tokens_of_absent_ranks(
    present: int, ranks: int, tokens: int, what: str
) -> None:
    """In all ranks that are there, each row once."""
    found = connect(InboxLayout(ranks, WIDTH, 64, LISTED), [CPU] * present, tokens)
    written = Counter(row for one in found for row in rows_written(one, what, tokens))
    memories = [rows_of(one, what).data_ptr() for one in found]
    expected = [first + token * ROW_BYTES[what] for first in memories for token in range(tokens)]
    assert written == Counter(expected)


@pytest.mark.parametrize("tokens", [9, 17, 100, 1000])
@pytest.mark.parametrize("what", ROW_BYTES)
def test_rows_of_any_length_stay_in_the_memory_of_a_rank(what: str, tokens: int) -> None:
    found = connect(InboxLayout(8, WIDTH, 64, LISTED), [CPU] * 2, tokens)
    memories = [rows_of(one, what) for one in found]
    assert {rows.nbytes for rows in memories} == {tokens * ROW_BYTES[what]}
    spans = [(rows.data_ptr(), rows.untyped_storage().nbytes()) for rows in memories]
    for one in found:
        for row in rows_written(one, what, tokens):
            assert any(first <= row <= first + size - ROW_BYTES[what] for first, size in spans)


def test_nobody_has_more_memory_where_all_ranks_are_there() -> None:
    for one in connect(InboxLayout(2, WIDTH, 64, LISTED), [CPU] * 2, 100):
        for what, row_bytes in ROW_BYTES.items():
            assert rows_of(one, what).untyped_storage().nbytes() == 100 * row_bytes


def test_layers_are_cut_for_absent_ranks_too() -> None:
    """Those that are there have states, which know of all of them."""
    config = ModelConfig.from_dict(tiny_config())
    placement = replace(Placement.tensor(config.num_hidden_layers, [CPU] * 2), absent_ranks=2)
    assert (placement.ranks, placement.cuts) == (2, 4)
    state = allocate_state(config, EngineConfig(device="cpu"), 64, placement)
    assert len(state.ranks) == 2
    assert [own.peers.ranks for own in state.ranks if own.peers is not None] == [4, 4]
