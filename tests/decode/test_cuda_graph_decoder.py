"""CUDAGraphDecoder on a GPU: both modes give what eager steps give, bit for bit, whatever is queued
ahead.
"""

import gc
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, SamplingParams
from dsv4.decode import Mode
from dsv4.layers.values import Watch, value_names
from dsv4.sampling import Sampler
from tests.decode.demo import GREEDY, MODES, PROMPTS, bits, decoder_of, load
from tests.gpu_counts import gpu_counts

pytestmark = pytest.mark.gpu

GPUS = gpu_counts(1, 2, 4)
LENGTHS = (1, 2, 4, 8)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("parallel", ["pipeline", "round-robin"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_ids_are_the_eager_ones(eager: Engine, mode: Mode, parallel: str, gpus: int) -> None:
    engine = load(cuda_graph=mode, gpus=gpus, parallel=parallel)
    for prompt in PROMPTS.values():
        expected = list(eager.generate(prompt, 40, GREEDY, stop_token_ids=()))
        assert list(engine.generate(prompt, 40, GREEDY, stop_token_ids=())) == expected


def test_greedy_ids_are_those_of_the_cpu(graph: Engine) -> None:
    cpu = load(device="cpu")
    for prompt in PROMPTS.values():
        assert list(graph.generate(prompt, 24, GREEDY)) == list(cpu.generate(prompt, 24, GREEDY))


def test_logits_are_the_eager_ones_bit_for_bit_across_window_borders(
    eager: Engine, graph: Engine
) -> None:
    prompt = (PROMPTS["recall_128"] * 2)[:380]
    for engine in (eager, graph):
        engine.reset()
        engine.prefill(prompt)
    for token in PROMPTS["stories"][:12]:  # 384 closes windows of 4 and of 128
        assert torch.equal(bits(graph.decode([token])), bits(eager.decode([token])))
    assert eager.position == graph.position


def test_one_capture_serves_every_sampler(
    eager: Engine, graph: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are values on the device: nothing is captured for another sampler."""
    prompt = PROMPTS["stories"]
    seeded = SamplingParams(2.0, seed=7)
    samplings = [
        seeded,
        GREEDY,
        SamplingParams(1.0, top_p=0.9, min_p=0.02, seed=8),
        replace(seeded, seed=99),
        GREEDY,
        seeded,
    ]
    expected = [
        list(eager.generate(prompt, 60, sampling, stop_token_ids=())) for sampling in samplings
    ]
    assert expected[1] != expected[0] != expected[3]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a graph was captured for a sampler")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    for sampling, tokens in zip(samplings, expected, strict=True):
        assert list(graph.generate(prompt, 60, sampling, stop_token_ids=())) == tokens


def test_a_stop_token_ends_it_and_steps_queued_in_vain_are_taken_back(
    eager: Engine, graph: Engine
) -> None:
    prompt = PROMPTS["stories"]
    free = list(eager.generate(prompt, 40, GREEDY, stop_token_ids=()))
    stop = next(
        token for index, token in enumerate(free) if index >= 5 and token not in free[:index]
    )
    for engine in (eager, graph):
        assert (
            list(engine.generate(prompt, 40, GREEDY, stop_token_ids=[stop]))
            == free[: free.index(stop)]
        )
        assert engine.last_run is not None
        assert engine.last_run.finish_reason == "stop"
    assert graph.position == eager.position
    assert {int(position_1) for position_1 in graph.state.positions_1.values()} == {eager.position}
    for engine in (eager, graph):
        engine.rewind(8)
    for token in free[:9]:  # what the steps in vain wrote is overwritten or hidden
        assert torch.equal(bits(graph.decode([token])), bits(eager.decode([token])))


def test_a_reader_that_leaves_early_leaves_a_usable_engine(eager: Engine, graph: Engine) -> None:
    prompt = PROMPTS["capitals"]
    tokens = graph.generate(prompt, 100, GREEDY, stop_token_ids=())
    taken = [next(tokens) for _ in range(6)]
    tokens.close()
    assert graph.position == len(prompt) + 5
    assert taken == list(eager.generate(prompt, 6, GREEDY, stop_token_ids=()))
    assert torch.equal(bits(graph.decode([taken[-1]])), bits(eager.decode([taken[-1]])))


def test_the_end_of_the_context_is_reached_exactly(eager: Engine) -> None:
    prompt = PROMPTS["capitals"]
    small = load(cuda_graph="full", max_context=len(prompt) + 10)
    found = list(small.generate(prompt, 100, GREEDY, stop_token_ids=()))
    assert found == list(eager.generate(prompt, 11, GREEDY, stop_token_ids=()))
    assert small.last_run is not None
    assert (small.last_run.finish_reason, small.position) == ("context", small.max_context)


def test_many_sequences_one_capture_and_flat_memory(eager: Engine, graph: Engine) -> None:
    """What this process has allocated does not grow once the longest prompt and the shortest have
    been seen, which is a decode step of its own. It may shrink: what earlier tests held is freed at
    some time.
    """
    assert graph.decoder is not None
    step = graph.decoder.step(1)
    prompts = list(PROMPTS.values())
    texts = [prompts[index % len(prompts)][: 10 + 9 * index] for index in range(20)]
    memory = []
    for prompt in (min(texts, key=len), max(texts, key=len), *texts):
        expected = list(eager.generate(prompt, 16, GREEDY, stop_token_ids=()))
        assert list(graph.generate(prompt, 16, GREEDY, stop_token_ids=())) == expected
        gc.collect()  # engines of other tests
        memory.append(torch.cuda.memory_allocated())
    assert graph.decoder.step(1) is step, "captured again"
    assert max(memory[1:]) == memory[1], memory


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_several_tokens_and_rejected_drafts(fresh: Engine, mode: Mode) -> None:
    ids = PROMPTS["recall_128"]
    decoder = decoder_of(fresh, mode, LENGTHS)
    assert decoder.lengths == LENGTHS

    def run(step: Any, tokens: int) -> list[Tensor]:
        fresh.reset()
        fresh.prefill(ids[:118])
        logits = []
        for accepted in (tokens, 1, max(1, tokens - 1), tokens, 1, 1):
            at = fresh.position
            logits.append(step(ids[at : at + tokens]).clone())
            fresh.rewind(tokens - accepted)
        return logits

    for tokens in LENGTHS:
        expected = run(fresh.decode, tokens)
        found = run(lambda part: decoder.replay(part, fresh.position), tokens)
        same = [torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True)]
        assert all(same), (tokens, same)


@pytest.mark.parametrize("mode", MODES)
def test_traced_values_are_the_eager_ones(fresh: Engine, mode: Mode) -> None:
    ids = PROMPTS["recall_128"][:20]
    found = load(cuda_graph=mode).trace(ids, prompt_tokens=8)
    eager = load().trace(ids, prompt_tokens=8)
    assert list(found) == [*value_names(fresh.config), "positions", "token_ids"]
    for name, rows in found.items():
        assert torch.equal(rows, eager[name]), name


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_watched_generation_is_the_unwatched_one(fresh: Engine, mode: Mode | None) -> None:
    prompt = PROMPTS["capitals"]
    expected = list(fresh.generate(prompt, 12, GREEDY, stop_token_ids=()))
    watch = Watch(lambda name, rows: None)
    found = load(cuda_graph=mode).generate(prompt, 12, GREEDY, stop_token_ids=(), watch=watch)
    assert list(found) == expected


def test_a_traced_decoder_generates_as_well(fresh: Engine) -> None:
    prompt = PROMPTS["capitals"]
    expected = list(fresh.generate(prompt, 12, GREEDY, stop_token_ids=()))
    decoder = decoder_of(fresh, "full").traced(lambda name: True)
    fresh.reset()
    fresh.prefill(prompt)
    assert list(decoder.generate(expected[0], Sampler(GREEDY), 11)) == expected[1:]
    shown: list[str] = []
    decoder.step(1).show(lambda name, rows: shown.append(name), fresh.position)
    assert shown == value_names(fresh.config)


@pytest.mark.parametrize("mode", MODES)
def test_a_decoder_is_complete_when_constructed(fresh: Engine, mode: Mode) -> None:
    """At any position, which it keeps; its first replay is the eager step."""
    ids = PROMPTS["recall_128"]
    fresh.prefill(ids[:20])
    decoder = decoder_of(fresh, mode, LENGTHS)
    assert fresh.position == 20
    assert {int(position_1) for position_1 in fresh.state.positions_1.values()} == {20}
    found = decoder.replay(ids[20:22], 20).clone()
    fresh.rewind(2)
    assert torch.equal(bits(found), bits(fresh.decode(ids[20:22])))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_4096_tokens_drift_nowhere(mode: Mode) -> None:
    """Ids equal to eager's, memory flat after warm-up, finite logits of steady size."""
    prompt = PROMPTS["stories"]
    count = 4096
    eager = load(max_context=4352)
    graph = load(max_context=4352, cuda_graph=mode)
    sampling = SamplingParams(temperature=1.0, seed=3)
    expected = list(eager.generate(prompt, count, sampling, stop_token_ids=()))
    memory = []
    found = []
    gc.collect()
    for index, token in enumerate(graph.generate(prompt, count, sampling, stop_token_ids=())):
        found.append(token)
        if index % 512 == 511:
            memory.append(torch.cuda.memory_allocated())
    assert found == expected
    assert len(set(memory[1:])) == 1, memory
    graph.reset()
    spreads = []
    graph.prefill(prompt)
    for index, token in enumerate(expected[:-1]):
        logits = graph.decode([token])
        if index % 512 == 0:
            assert bool(logits.isfinite().all())
            spreads.append(float(logits.std()))
    assert max(spreads) < 3 * min(spreads), spreads


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["pipeline", "round-robin"])
@pytest.mark.parametrize("peers", [True, False])
def test_two_gpus_prefill_in_chunks_like_one(
    eager: Engine,
    parallel: Literal["pipeline", "round-robin"],
    peers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without peer access the copies go through host memory; a chunk in flight must not meet
    another's streams.
    """
    if not peers:
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    ids = (PROMPTS["recall_128"] * 4)[:1500]
    engine = load(gpus=2, parallel=parallel, prefill_chunk=64, cuda_graph="full")
    expected = load(prefill_chunk=64)
    for _ in range(3):
        engine.reset()
        expected.reset()
        assert torch.equal(bits(engine.prefill(ids).cpu()), bits(expected.prefill(ids).cpu()))
        for token in ids[:20]:
            assert torch.equal(
                bits(engine.decode([token]).cpu()), bits(expected.decode([token]).cpu())
            )
