"""Kernels that poll words, executed on the CPU: what they take, what they wait for, and what faults
that are planted in them change.
"""

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig
from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange import decode, sum_ranks
from dsv4.ops.exchange.words import WordSum
from dsv4.ops.hyper_connection import decode as hc_decode
from dsv4.ops.hyper_connection.left_comb import leave_comb
from dsv4.parallel.sharding import cut_of
from dsv4.peers import LOGITS_EXCHANGE, InboxLayout
from dsv4.weights.parameters import parameters
from tests.ops.cases import normal
from tests.ops.exchange.on_gpu import write
from tests.ops.exchange.one_inbox import CPU, SOON, ranks_of_one_inbox
from tests.ops.hyper_connection.meta import arguments
from tests.ptx.faults import Deadlock, Trap
from tests.ptx.nvrtc import SourceEdit, run_recorded
from tests.ptx.schedule import SCHEDULES

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
WIDTH = 128
STEP = 7
FAULTS = {
    "tags are not compared": SourceEdit(
        "exchange.cuh", "here = here && words[i][1] == tag;", "here = here && words[i][1] != 1;"
    ),
    "tags have no step": SourceEdit(
        "exchange.cuh", "return number * EXCHANGES_PER_STEP + exchange;", "return exchange;"
    ),
    "ranks are added from the last one": SourceEdit(
        "exchange.cuh",
        "for (int rank = 1; rank < RANKS; ++rank) sums[i] += values[rank][i];",
        "for (int rank = RANKS - 1; rank > 0; --rank) sums[i] += values[rank][i];",
    ),
}


class Room:
    """The last rank of ``ranks``, with all that its kernels reach by addresses in one piece."""

    def __init__(self, ranks: int, tokens: int) -> None:
        self.peers = ranks_of_one_inbox(InboxLayout(ranks, WIDTH, 250), 16, STEP)[-1]
        self.words = WordSum(2, tokens, WIDTH)
        self.parts = [normal(tokens, WIDTH, seed=rank) for rank in range(ranks)]
        # Sums of these differ in every order of the ranks.
        for part, value in zip(self.parts, (1e8, 1.0, -1e8, 3.0), strict=False):
            part[:, 0] = value

    @property
    def expected(self) -> Tensor:
        return sum_ranks(self.parts, torch.bfloat16)

    def stale(self) -> None:
        """Every word is one of the same exchange in the step before."""
        for rank, part in enumerate(self.parts):
            write(self.peers, self.words, rank, torch.full_like(part, 5.0), STEP - 1)

    def push(self, missing: int | None = None) -> None:
        """The words of all ranks, but for one."""
        for rank, part in enumerate(self.parts):
            if rank != missing:
                write(self.peers, self.words, rank, part, STEP)

    def recording(self) -> Recording:
        return Recording(Target(CPU, ARCHITECTURE, 132), self.words.tokens, None, self.peers)

    def sums(self, edit: SourceEdit | None = None, schedule: str = "random") -> Tensor:
        """What ``sum_words`` makes of the words."""
        recording = self.recording()
        decode.summed(recording, self.words)
        (launch,) = recording.items
        assert isinstance(launch, Launch)
        y_TE = torch.full((self.words.tokens, WIDTH), 9.0, dtype=torch.bfloat16)
        run_recorded(
            launch,
            ARCHITECTURE,
            {"peers": self.peers.table_P, "y": y_TE},
            self.words.tokens,
            SCHEDULES[schedule],
            edit=edit,
        )
        return y_TE


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_words_are_added_in_the_order_of_the_ranks(ranks: int, schedule: str) -> None:
    for tokens in (1, 3):
        room = Room(ranks, tokens)
        room.stale()
        room.push()
        assert torch.equal(room.sums(schedule=schedule), room.expected)


@pytest.mark.parametrize("missing", range(4))
def test_the_words_of_every_rank_are_waited_for(missing: int) -> None:
    """Those of the step before are there. A wait without an end is a deadlock to the machine."""
    room = Room(4, 2)
    room.stale()
    room.push(missing)
    with pytest.raises(Deadlock):
        room.sums()


@pytest.mark.parametrize("missing", range(4))
def test_the_host_is_told_whose_words_are_missing(missing: int) -> None:
    room = Room(4, 2)
    room.push(missing)
    with pytest.raises(Trap):
        room.sums(SOON)
    assert room.peers.fault_4.tolist() == [1, room.words.exchange, missing, STEP]


def test_tags_that_are_not_compared_let_old_words_in() -> None:
    room = Room(4, 1)
    room.stale()
    room.push(missing=3)
    assert bool(room.sums(FAULTS["tags are not compared"]).isfinite().all())


def test_tags_without_the_step_find_no_word_of_it() -> None:
    room = Room(4, 1)
    room.push()
    with pytest.raises(Deadlock):
        room.sums(FAULTS["tags have no step"])


def test_another_order_of_the_ranks_is_another_sum() -> None:
    room = Room(4, 1)
    room.push()
    assert not torch.equal(room.sums(FAULTS["ranks are added from the last one"]), room.expected)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_logits_of_uneven_ranks_come_in_the_order_of_the_vocabulary(ranks: int) -> None:
    room = Room(ranks, 3)
    layout = room.peers.layout
    head = parameters(ModelConfig.from_dict(tiny_config(vocab_size=layout.vocabulary)))
    words = WordSum(LOGITS_EXCHANGE, 3, layout.head_rows)
    whole = normal(3, layout.vocabulary, seed=1)
    for rank in range(ranks):
        cut = cut_of(head["head.weight"], ranks, rank)
        assert cut is not None
        write(room.peers, words, rank, whole[:, cut.first : cut.stop], STEP)
    recording = room.recording()
    decode.gather_logits(recording, words)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    found = torch.full_like(whole, torch.nan)
    run_recorded(launch, ARCHITECTURE, {"peers": room.peers.table_P, "logits": found}, 3)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_seam_reads_words_as_it_reads_their_sum(ranks: int) -> None:
    """Streams and partial sums bit for bit, of all tokens of a block."""
    room = Room(ranks, 3)
    room.stale()
    room.push()
    for found, expected in zip(mixed(room, room.words), mixed(room, room.expected), strict=True):
        assert torch.equal(found, expected)


def test_a_seam_makes_the_comb_that_was_left_beside_words() -> None:
    room = Room(4, 3)
    room.push()
    found = mixed(room, room.words, left=True)
    for part, expected in zip(found, mixed(room, room.expected, left=True), strict=True):
        assert torch.equal(part, expected)
    assert not torch.equal(found[0], mixed(room, room.words)[0])


def test_every_token_of_a_block_has_streams_of_its_own() -> None:
    room = Room(4, 3)
    room.push()
    edit = SourceEdit("hyper_connection.cu", "(&mixed[token][k]", "(&mixed[0][k]")
    _, partials = mixed(room, room.words, edit)
    assert not torch.equal(partials, mixed(room, room.expected)[1])


def mixed(
    room: Room, y: Tensor | WordSum, edit: SourceEdit | None = None, left: bool = False
) -> list[Tensor]:
    """The streams and the partial sums that ``hc_mix`` writes of y. ``left``: comb is to be made of
    what would be it.
    """
    given = arguments("hc_seam", 3, 4, WIDTH)
    streams = normal(3, 4, WIDTH, seed=5, dtype=torch.bfloat16)
    recording = room.recording()
    recording.call(print)
    if left:
        leave_comb(recording, torch.empty_like(given[3]), given[3], given[4])
    hc_decode.hc_seam(recording, y, *given[1:])
    mix = recording.items[1]
    assert isinstance(mix, Launch)
    partials = mix.arguments["partials"]
    assert isinstance(partials, Tensor)
    written = [torch.full_like(streams, 9.0), torch.full(partials.shape, 9.0)]
    memory = {
        "streams": streams,
        "post": normal(3, 4, seed=6),
        "comb": normal(3, 4, 4, seed=7).softmax(-1),
        "fn": normal(24, 4 * WIDTH, seed=8),
        **({"y": y} if isinstance(y, Tensor) else {"peers": room.peers.table_P}),
        **dict(zip(("streams_out", "partials"), written, strict=True)),
    }
    run_recorded(mix, ARCHITECTURE, memory, 3, edit=edit)
    return written
