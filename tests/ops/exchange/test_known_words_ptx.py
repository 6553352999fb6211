"""Known words, executed on the CPU: every rank pushes its own, the sums are right where they
arrive, and what is planted is counted.
"""

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange.known_words import check_known, push_known
from dsv4.peers import InboxLayout
from tests.ops.exchange.on_gpu import words_at
from tests.ops.exchange.one_inbox import CPU, ranks_of_one_inbox
from tests.ptx.faults import Deadlock
from tests.ptx.nvrtc import SourceEdit, run_recorded

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
WIDTH = 80
TOKENS = 3
FAULTS = {
    "tags are not compared": SourceEdit(
        "exchange.cuh", "here = here && words[i][1] == tag;", "here = here && words[i][1] != 1;"
    ),
    "ranks are added from the last one": SourceEdit(
        "exchange.cuh",
        "for (int rank = 1; rank < RANKS; ++rank) sums[i] += values[rank][i];",
        "for (int rank = RANKS - 1; rank > 0; --rank) sums[i] += values[rank][i];",
    ),
    "a rank is left out": SourceEdit(
        "exchange.cuh",
        "for (int rank = 1; rank < RANKS; ++rank) sums[i] += values[rank][i];",
        "for (int rank = 2; rank < RANKS; ++rank) sums[i] += values[rank][i];",
    ),
}


class Room:
    """Ranks that all push into one inbox, which one of them checks: all in one piece of memory."""

    def __init__(self, ranks: int, step: int = 5) -> None:
        self.ranks = ranks_of_one_inbox(InboxLayout(ranks, WIDTH, ranks), TOKENS, step)
        self.wrong_1 = torch.zeros(1, dtype=torch.int32)

    def launches(self, rank: int) -> tuple[Launch, Launch]:
        """The third exchange of a rank."""
        recording = Recording(Target(CPU, ARCHITECTURE, 132), TOKENS, None, self.ranks[rank])
        for _ in range(3):
            words = push_known(recording, TOKENS, WIDTH)
        check_known(recording, words, self.wrong_1)
        push, check = recording.items[-2:]
        assert isinstance(push, Launch)
        assert isinstance(check, Launch)
        return push, check

    def push(self, rank: int) -> None:
        launch, _ = self.launches(rank)
        run_recorded(launch, ARCHITECTURE, {"peers": self.ranks[rank].table_P}, TOKENS)

    def wrong(self, edit: SourceEdit | None = None) -> int:
        _, launch = self.launches(0)
        tensors = {"peers": self.ranks[0].table_P, "wrong": self.wrong_1}
        run_recorded(launch, ARCHITECTURE, tensors, TOKENS, edit=edit)
        return int(self.wrong_1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_words_of_all_ranks_are_the_sums_that_each_expects(ranks: int) -> None:
    room = Room(ranks)
    for rank in range(ranks):
        room.push(rank)
    assert room.wrong() == 0
    words = words_at(room.ranks[0], push_known(*recorded(room)), 0)[: TOKENS * WIDTH]
    assert len(set((words & 0xFFFFFFFF).tolist())) > TOKENS * WIDTH - 3


def recorded(room: Room) -> tuple[Recording, int, int]:
    return Recording(Target(CPU, ARCHITECTURE, 132), TOKENS, None, room.ranks[0]), TOKENS, WIDTH


@pytest.mark.parametrize("bit", [12, 22, 23, 31])
def test_one_wrong_bit_of_one_word_is_one_wrong_sum(bit: int) -> None:
    room = Room(2)
    room.push(0)
    room.push(1)
    recording, *shape = recorded(room)
    words = push_known(recording, *shape)
    words_at(room.ranks[0], words, 1)[17] ^= 1 << bit
    assert room.wrong() == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_exchange_are_counted(fault: str) -> None:
    room = Room(4)
    for rank in range(3):
        room.push(rank)
    if fault != "tags are not compared":
        room.push(3)
    assert room.wrong(FAULTS[fault]) > 0


def test_a_rank_that_did_not_push_is_waited_for() -> None:
    room = Room(2)
    room.push(1)
    with pytest.raises(Deadlock):
        room.wrong()
