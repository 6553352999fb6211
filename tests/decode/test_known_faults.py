"""Reported faults of decoding on a GPU: rows J of docs/regressions.md."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.decode import Mode
from dsv4.launch import prepared
from dsv4.launch.loading import driver
from dsv4.step.token_feed import TokenFeed
from tests.decode.demo import (
    GREEDY,
    MODES,
    PROMPTS,
    assert_same_logits,
    assert_same_state,
    bits,
    load,
    snapshot,
    start,
    steps_of,
)

pytestmark = pytest.mark.gpu

IDS = (PROMPTS["recall_128"] * 4)[:700]


def decoded(engine: Engine, ids: Sequence[int]) -> list[Tensor]:
    """The logits behind each of ``ids``, one step each."""
    return [engine.decode([token]) for token in ids]


def test_spec11_j61_steps_captured_at_the_start_select_behind_the_longest_list(
    eager: Engine, graph: Engine
) -> None:
    """The demo lists 64 entries, all that there are up to token 259; it captured at token 0."""
    assert eager.config.index_topk == 64
    for engine in (eager, graph):
        start(engine, IDS[:250])
    for ids in (IDS[250:270], IDS[270:290]):
        assert_same_logits(decoded(graph, ids), decoded(eager, ids))
    for engine in (eager, graph):
        engine.prefill(IDS[290:600])
    assert_same_logits(decoded(graph, IDS[600:612]), decoded(eager, IDS[600:612]))


def test_spec11_j70_launches_that_overlap_change_no_bit(
    eager: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programmatic dependent launch on, and off in an engine that is built without it."""
    attributes: Callable[[int, bool], list[Any]] = prepared._attributes
    overlap = driver().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

    def without_overlap(cluster: int, early: bool) -> list[Any]:
        found = attributes(cluster, early)
        kept = [attribute for attribute in found if attribute.id != overlap]
        assert len(kept) == len(found) - 1
        return kept

    monkeypatch.setattr(prepared, "_attributes", without_overlap)
    alone = load()
    for engine in (eager, alone):
        start(engine, IDS[:122])
    assert_same_logits(decoded(eager, IDS[122:140]), decoded(alone, IDS[122:140]))
    for engine in (eager, alone):
        engine.prefill(IDS[140:400])
    assert_same_state(snapshot(eager), snapshot(alone))


def test_spec11_j70_a_thousand_replays_leave_the_same_bits(graph: Engine) -> None:
    """Of the step that completes a window of 4 and one of 128 tokens."""
    start(graph, IDS[:127])
    expected = bits(graph.decode([IDS[127]]))
    caches = snapshot(graph)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        graph.rewind(1)
        different += (bits(graph.decode([IDS[127]])) != expected).any()
    assert int(different) == 0
    assert_same_state(snapshot(graph), caches)


def test_spec11_j71_nothing_of_the_captured_call_is_read_again(
    eager: Engine, graph: Engine
) -> None:
    """Tokens, position, caches and sampler change between replays of one capture."""
    for prompt, ids in ((IDS[:40], IDS[300:320]), (IDS[100:430], IDS[:20]), (IDS[:9], IDS[50:70])):
        for engine in (eager, graph):
            start(engine, prompt)
        assert_same_logits(decoded(graph, ids), decoded(eager, ids))


@torch.inference_mode()
def mixed_steps(engine: Engine, between: Callable[[], None]) -> list[Tensor]:
    """Hidden states of chunks and logits of single tokens in turn; ``between`` is called before
    every step.
    """
    start(engine, IDS[:30])
    found = []
    for chunk, tokens in ((130, 3), (9, 5), (64, 2), (200, 4)):
        at = engine.position
        between()
        found.append(steps_of(engine).run(IDS[at : at + chunk]).clone())
        for token in IDS[at + chunk : at + chunk + tokens]:
            between()
            found.append(engine.decode([token]))
    return found


def test_spec11_j72_j73_a_workspace_of_nan_between_steps_changes_no_bit(
    eager: Engine, graph: Engine
) -> None:
    """Prefill and replays share it in turn; chunks do not fill what their step is recorded for."""
    expected = mixed_steps(eager, lambda: None)
    caches = snapshot(eager)

    def poison_workspace() -> None:
        for rank in steps_of(graph).ranks:
            for memory in rank.memory.values():
                memory.bytes.fill_(0xFF)

    assert_same_logits(mixed_steps(graph, poison_workspace), expected)
    assert_same_state(snapshot(graph), caches)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_spec11_j95_the_first_tokens_after_the_start_in_every_mode(
    eager: Engine, mode: Mode | None
) -> None:
    """Of an engine that has done nothing else, against steps that the host waits for."""
    prompt = PROMPTS["stories"]
    found = list(load(cuda_graph=mode).generate(prompt, 6, GREEDY, stop_token_ids=()))
    eager.reset()
    expected = [int(eager.prefill(prompt).argmax())]
    while len(expected) < 6:
        expected.append(int(eager.decode(expected[-1:])[0].argmax()))
    assert found == expected


def test_spec11_j95_ids_are_read_before_their_memory_is_written_again() -> None:
    """The device sleeps while the host gives it three times as many ids as it has room for."""
    device = torch.device("cuda", 0)
    feed = TokenFeed((device,), device, 1)
    torch.cuda._sleep(50_000_000)
    seen = []
    for token in range(12):
        feed.put([token])
        seen.append(feed.inputs[device].clone())
    assert torch.cat(seen).tolist() == list(range(12))
