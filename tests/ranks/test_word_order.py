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
from dsv4.step.recorded import RecordedStep
from dsv4.step.recorder import record_logits
from dsv4.weights.parameters import MtpKind
from tests.ranks.planned_drafts import planned_drafts
from tests.ranks.planned_ranks import LoggedRanks, exchange_of, has_words, planned_ranks, pushes
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
    sampler = planned.sampler if hasattr(planned, "sampler") else planned.loop.sampler
    target = TARGETS[device]
    return record_logits(planned.model, CUDA_TABLE, target, hidden_TE, planned.state, sampler)


def follow(
    ranks: Sequence[Any], steps: Sequence[tuple[Kind, int]], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Queues the steps; returns how many words were read, counted by kernels. A rank that polls has
    waited for all that the others did before they pushed.
    """
    count = len(ranks)
    memory = SharedMemory(count)
    reads = 0
    for kind, tokens in steps:
        models: Any = [
            SimpleNamespace(record=partial(record, one, kind), state=one.state) for one in ranks
        ]
        logged = LoggedRanks.of(models, tokens, monkeypatch)
        logged.step.run(tokens)
        if kind == "step" and tokens == 1:
            logged.step.sample()
        # By exchange and rank: the last one of this number.
        pushed: dict[Any, list[int]] = {}
        for device, what in logged.log:
            rank = device.index
            if not memory.runs(rank, what):
                continue
            launch = logged.launch((device, what))
            if launch is None or not has_words(launch):
                continue
            exchange = exchange_of(launch)
            slot = slot_of(launch, ranks[0].state.peers)
            if pushes(launch):
                for other in range(count):
                    memory.touch(rank, (other, slot, rank), writes=True)
                pushed[exchange, rank] = list(memory.clocks[rank])
                continue
            for other in range(count):
                memory.wait_for(rank, pushed[exchange, other])
            for other in range(count):
                memory.touch(rank, (rank, slot, other), writes=False)
            reads += 1
    return reads


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
