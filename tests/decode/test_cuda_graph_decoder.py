"""CUDAGraphDecoder on a GPU: both modes give what eager steps give, bit for bit, whatever is queued ahead."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams, UserError
from dsv4.decode import CUDAGraphDecoder, Mode
from dsv4.demo import CHECKPOINT
from dsv4.demo.recall import recall_128
from dsv4.demo.tasks import arithmetic, capitals, stories
from dsv4.validate.traces import Trace, graph_trace
from encoding.tokenizer import Tokenizer
from tests.ops.gpu import poison

pytestmark = pytest.mark.gpu

TOKENIZER = Tokenizer(CHECKPOINT)
PROMPTS = {
    task.__name__: TOKENIZER.encode(task(random.Random(1), True).prompt)
    for task in (capitals, stories, arithmetic, recall_128)
}
GREEDY = SamplingParams(temperature=0.0)
MODES: tuple[Mode, ...] = ("split", "full")
GPUS = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]


def load(**settings: Any) -> Engine:
    return Engine.load(CHECKPOINT, EngineConfig(**{"device": "cuda", "max_context": 2048, **settings}))


def decoder_of(engine: Engine, mode: Mode) -> CUDAGraphDecoder:
    return CUDAGraphDecoder(engine.model, engine.state, engine.ops, mode, engine.max_context)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


@pytest.fixture(scope="module")
def eager() -> Engine:
    return load()


@pytest.fixture(scope="module", params=MODES)
def graph(request: pytest.FixtureRequest) -> Engine:
    return load(cuda_graph=request.param)


@pytest.fixture
def fresh(eager: Engine) -> Iterator[Engine]:
    eager.reset()
    yield eager
    eager.reset()


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("parallel", ["pipeline", "round-robin"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_ids_are_the_eager_ones(eager: Engine, mode: Mode, parallel: str, gpus: int) -> None:
    engine = load(cuda_graph=mode, gpus=gpus, parallel=parallel)
    for prompt in PROMPTS.values():
        expected = list(eager.generate(prompt, 40, GREEDY, stop_token_ids=()))
        assert list(engine.generate(prompt, 40, GREEDY, stop_token_ids=())) == expected


def test_greedy_ids_are_those_of_the_cpu(graph: Engine) -> None:
    cpu = Engine.load(CHECKPOINT, EngineConfig(device="cpu", max_context=2048))
    for prompt in PROMPTS.values():
        assert list(graph.generate(prompt, 24, GREEDY)) == list(cpu.generate(prompt, 24, GREEDY))


def test_logits_are_the_eager_ones_bit_for_bit_across_window_borders(eager: Engine, graph: Engine) -> None:
    prompt = (PROMPTS["recall_128"] * 2)[:380]
    for engine in (eager, graph):
        engine.reset()
        engine.prefill(prompt)
    for token in PROMPTS["stories"][:12]:  # 384 closes windows of 4 and of 128
        assert torch.equal(bits(graph.decode([token])), bits(eager.decode([token])))
    assert eager.position == graph.position


@pytest.mark.parametrize("sampling", [SamplingParams(0.8, seed=7), SamplingParams(1.0, top_p=0.9, min_p=0.02, seed=8)])
def test_sampled_ids_are_the_eager_ones(eager: Engine, graph: Engine, sampling: SamplingParams) -> None:
    prompt = PROMPTS["stories"]
    expected = list(eager.generate(prompt, 60, sampling, stop_token_ids=()))
    assert list(graph.generate(prompt, 60, sampling, stop_token_ids=())) == expected
    other = replace(sampling, seed=99)
    assert list(graph.generate(prompt, 60, other, stop_token_ids=())) == list(
        eager.generate(prompt, 60, other, stop_token_ids=())
    )


def test_a_stop_token_ends_it_and_steps_queued_in_vain_are_taken_back(eager: Engine, graph: Engine) -> None:
    prompt = PROMPTS["stories"]
    free = list(eager.generate(prompt, 40, GREEDY, stop_token_ids=()))
    stop = next(token for index, token in enumerate(free) if index >= 5 and token not in free[:index])
    for engine in (eager, graph):
        assert list(engine.generate(prompt, 40, GREEDY, stop_token_ids=[stop])) == free[: free.index(stop)]
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
    assert graph.decoder is not None
    step = graph.decoder.step
    prompts = list(PROMPTS.values())
    memory = []
    for index in range(20):
        prompt = prompts[index % len(prompts)][: 10 + 9 * index]
        expected = list(eager.generate(prompt, 16, GREEDY, stop_token_ids=()))
        assert list(graph.generate(prompt, 16, GREEDY, stop_token_ids=())) == expected
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert graph.decoder.step is step, "captured again"
    assert len(set(memory[-8:])) == 1, memory


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_steps_of_several_tokens_and_rejected_drafts(fresh: Engine, mode: Mode, tokens: int) -> None:
    decoder, ids = decoder_of(fresh, mode), PROMPTS["recall_128"]
    decoder.capture(tokens)
    assert decoder.tokens == tokens

    def run(step: Any) -> list[Tensor]:
        fresh.reset()
        fresh.prefill(ids[:118])
        logits = []
        for accepted in (tokens, 1, tokens - 1, tokens, 1, 1):
            at = fresh.position
            logits.append(step(ids[at : at + tokens]).clone())
            fresh.rewind(tokens - accepted)
        return logits

    expected = run(fresh.decode)
    found = run(lambda part: decoder.replay(part, fresh.position))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_streams_after_every_block_are_the_eager_ones(fresh: Engine, mode: Mode) -> None:
    ids = PROMPTS["capitals"][:20]
    found, expected = graph_trace(fresh, ids, mode), cast("Trace", load(prefill_chunk=1).trace(ids))
    for layer, (streams, others) in enumerate(zip(found["layers"], expected["layers"], strict=True)):
        assert torch.equal(streams, others), f"layer {layer}"
    assert torch.equal(found["final"], expected["final"])
    assert torch.equal(found["logits"], expected["logits"])


def test_wrong_use_is_refused_by_name(fresh: Engine) -> None:
    decoder = decoder_of(fresh, "full")
    with pytest.raises(ValueError, match="tokens: found 9, expected 1 to 8"):
        decoder.capture(9)
    with pytest.raises(ValueError, match="generate: found a capture of 0 tokens"):
        next(decoder.generate(1, None, 4))  # pyright: ignore[reportArgumentType]
    assert torch.equal(bits(decoder.replay(5, 0)), bits(load().decode([5]))), "a plain step when not captured"
    decoder.capture()
    with pytest.raises(ValueError, match="token_ids: found 2 tokens, expected 1 as captured"):
        decoder.replay([1, 2], fresh.position)
    with pytest.raises(ValueError, match="position: found 7, expected 0 to 1"):
        decoder.replay(1, 7)
    fresh.state.set_position(fresh.max_context)
    with pytest.raises(ValueError, match=f"position: found {fresh.max_context} . 1 tokens"):
        decoder.replay(1, fresh.max_context)
    with pytest.raises(ValueError, match="expected the same CUDA devices"):
        CUDAGraphDecoder(fresh.model, load(device="cpu").state, fresh.ops, "full", 8)
    with pytest.raises(UserError, match="found the torch ops, expected --ops cuda"):
        load(ops="torch", cuda_graph="full")


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_capture_leaves_eager_steps(fresh: Engine, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(fresh, mode)
    expected = fresh.decode([5]).clone()
    fresh.reset()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dsv4.decode.captured_step.CapturedStep._begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.capture()
    assert (decoder.tokens, decoder.regions, fresh.position) == (0, (), 0)
    assert torch.equal(bits(decoder.replay(5, 0)), bits(expected))
    decoder.capture()
    assert torch.equal(bits(decoder.replay(5, 0)), bits(expected))


def test_nan_logits_end_it_by_name(eager: Engine) -> None:
    broken = load(cuda_graph="full")
    broken.model.head.norm.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="contain NaN"):
        list(broken.generate(PROMPTS["capitals"], 8, GREEDY))
    broken = load(cuda_graph="full")
    tokens = broken.generate(PROMPTS["capitals"], 30, GREEDY, stop_token_ids=())
    next(tokens)
    broken.model.head.norm.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="contain NaN"):
        list(tokens)


def test_the_self_check_picks_an_exact_mode(eager: Engine) -> None:
    engine = load(cuda_graph="auto")
    assert engine.decoder is not None
    assert engine.decoder.mode in MODES
    assert engine.position == 0
    prompt = PROMPTS["arithmetic"]
    expected = list(eager.generate(prompt, 20, GREEDY))
    assert list(engine.generate(prompt, 20, GREEDY)) == expected


@pytest.mark.parametrize("mode", MODES)
def test_regions_are_named_in_order(mode: Mode) -> None:
    regions = load(cuda_graph=mode).decoder
    assert regions is not None
    names, layers = regions.regions, 6
    if mode == "full":
        assert names == (f"layers 0 to {layers - 1}", "head")
    else:
        expected = [f"layer {layer} graph {part}" for layer in range(layers) for part in "AB"]
        assert names == (*expected, f"layer {layers - 1} mix", "head")


def test_lesson_13_replays_read_nothing_that_was_freed(eager: Engine, graph: Engine) -> None:
    prompt = PROMPTS["stories"]
    expected = list(eager.generate(prompt, 20, GREEDY, stop_token_ids=()))
    torch.cuda.empty_cache()
    poison()
    assert list(graph.generate(prompt, 20, GREEDY, stop_token_ids=())) == expected


@pytest.mark.filterwarnings("error:The CUDA Graph is empty")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", MODES)
def test_lesson_14_every_device_has_graphs_that_do_something(eager: Engine, mode: Mode) -> None:
    engine = load(cuda_graph=mode, gpus=2)
    prompt = PROMPTS["capitals"]
    for other in (engine, eager):
        other.reset()
        other.prefill(prompt)
    assert torch.equal(bits(engine.decode([5]).cpu()), bits(eager.decode([5]).cpu()))
    assert {int(position_1) for position_1 in engine.state.positions_1.values()} == {len(prompt) + 1}


def test_lesson_16_steps_create_no_events_and_print_nothing(
    graph: Engine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = graph.generate(PROMPTS["stories"], 40, GREEDY, stop_token_ids=())
    next(tokens)
    next(tokens)
    capfd.readouterr()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an event was created in a step")

    monkeypatch.setattr(torch.cuda, "Event", refuse)
    assert len(list(tokens)) == 38
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_4096_tokens_drift_nowhere(mode: Mode) -> None:
    """Ids equal to eager's, memory flat after warm-up, finite logits of steady size."""
    prompt, count, settings = PROMPTS["stories"], 4096, {"max_context": 4352}
    eager, graph = load(**settings), load(cuda_graph=mode, **settings)
    sampling = SamplingParams(temperature=1.0, seed=3)
    expected = list(eager.generate(prompt, count, sampling, stop_token_ids=()))
    memory, found = [], []
    for index, token in enumerate(graph.generate(prompt, count, sampling, stop_token_ids=())):
        found.append(token)
        if index % 512 == 511:
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
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
    eager: Engine, parallel: Literal["pipeline", "round-robin"], peers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without peer access the copies go through host memory; a chunk in flight must not meet another's streams."""
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
            assert torch.equal(bits(engine.decode([token]).cpu()), bits(expected.decode([token]).cpu()))
