"""No rank writes a word anew before the ranks that it was for have read it, whatever steps follow
each other.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.ops.tables import CUDA_TABLE
from dsv4.peers import Peers
from dsv4.sampling import SamplerState
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import record_logits
from dsv4.weights.parameters import MtpKind
from tests.ranks.planned_drafts import planned_drafts
from tests.ranks.planned_ranks import LoggedRanks, exchange_of, has_words, planned_ranks, pushes
from tests.step.interrupted import interrupted_behind
from tests.step.memory_order import SharedMemory
from tests.step.planned_model import META, TARGETS

Kind = Literal["step", "logits", "draft"]

PROMPT = 512
# A prompt with the logits of all of it, decoding behind it, another prompt, its last logits twice.
STEPS: list[tuple[Kind, int]] = [
    *[("step", PROMPT), ("logits", 8), ("logits", 8), ("logits", 1)],
    *[("step", 1), ("step", 1), ("logits", 1), ("step", 3), ("step", 8)],
    *[("step", PROMPT), ("logits", 1), ("logits", 1), ("step", 1), ("step", PROMPT), ("step", 1)],
]
DRAFTED: list[tuple[Kind, int]] = [
    *[("step", PROMPT), ("logits", 1), ("draft", 3), ("step", 4), ("draft", 3), ("step", 4)],
    *[("draft", 1), ("draft", 3), ("step", 1), ("draft", 3), ("logits", 8), ("draft", 3)],
]


def record(planned: Any, kind: Kind, tokens: int) -> RecordedStep:
    """A step of a rank."""
    if kind == "step":
        return planned.record(tokens)
    if kind == "draft":
        return planned.draft_step(tokens)
    device = planned.model.head_device
    width = planned.model.embed.table_VE.shape[1]
    hidden_TE = torch.empty((tokens, width), dtype=torch.bfloat16, device=META)
    sampler = SamplerState.allocate(META)
    target = TARGETS[device]
    return record_logits(planned.model, CUDA_TABLE, target, hidden_TE, planned.state, sampler)


class Words:
    """The words of all ranks. A rank that polls has waited for all that the others did before they
    pushed.
    """

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.reads = 0
        self._memory = SharedMemory(len(ranks))
        self._peers = ranks[0].state.peers
        # By exchange and rank: the last one of this number.
        self._pushed: dict[Any, list[int]] = {}

    def follow(self, logged: LoggedRanks) -> None:
        """What was queued touches words in an order that is certain. Counts kernels that read."""
        everyone = range(len(logged.step.ranks))
        for device, what in logged.log:
            rank = device.index
            if not self._memory.runs(rank, what):
                continue
            launch = logged.launch((device, what))
            if launch is None or not has_words(launch):
                continue
            exchange = exchange_of(launch)
            slot = slot_of(launch, self._peers)
            if pushes(launch):
                for other in everyone:
                    self._memory.touch(rank, (other, slot, rank), writes=True)
                self._pushed[exchange, rank] = list(self._memory.clocks[rank])
                continue
            for other in everyone:
                self._memory.wait_for(rank, self._pushed[exchange, other])
            for other in everyone:
                self._memory.touch(rank, (rank, slot, other), writes=False)
            self.reads += 1


def follow(
    ranks: Sequence[Any], steps: Sequence[tuple[Kind, int]], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Queues the steps; returns how many kernels read words."""
    words = Words(ranks)
    for kind, tokens in steps:
        models: Any = [
            SimpleNamespace(record=partial(record, one, kind), state=one.state) for one in ranks
        ]
        logged = LoggedRanks.of(models, tokens, monkeypatch)
        logged.step.run(tokens)
        if kind == "step" and tokens == 1:
            logged.step.sample()
        words.follow(logged)
    return words.reads


def slot_of(launch: Launch, peers: Peers) -> int:
    """Which of an inbox's slots a launch with words writes or reads."""
    word = launch.arguments["slot"]
    assert isinstance(word, int)
    return word // (peers.ranks * peers.layout.rank_words)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_words_of_a_model_are_read_before_they_are_written_anew(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = planned_ranks("v4-flash", ranks, 5)
    assert follow(planned, STEPS, monkeypatch) > 60 * ranks


@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_words_of_a_draft_module_are_read_before_they_are_written_anew(
    kind: MtpKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow(planned_drafts("v4-flash", kind, 4), DRAFTED, monkeypatch) > 60 * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_words_of_an_interrupted_step_are_read_before_the_next_one(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends behind any part of any rank, and the position is set again."""
    planned = planned_ranks("v4-flash", ranks, 5)
    logged = LoggedRanks.of(planned, 1, monkeypatch)
    parts = ranks * len(logged.step.first.model_parts)
    for most in range(1, parts):
        logged.log.clear()
        with interrupted_behind(most), planned[0].state.staying():
            logged.step.run(1)
        logged.step.run(1)
        Words(planned).follow(logged)
