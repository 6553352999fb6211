"""CUDAGraphDecoder on a GPU: wrong use, interruptions, NaN, and the faults of earlier engines."""

from typing import Any

import pytest
import torch

from dsv4 import Engine, UserError
from dsv4.decode import Mode
from dsv4.sampling import Sampler
from dsv4.step.captured import CapturedStep
from tests.decode.demo import GREEDY, LAYERS, MODES, PROMPTS, bits, decoder_of, load
from tests.ops.gpu import poison

pytestmark = pytest.mark.gpu


def test_wrong_use_is_refused_by_name(fresh: Engine) -> None:
    for tokens in (0, 9):
        with pytest.raises(ValueError, match=f"tokens: found {tokens}, expected 1 to 8"):
            decoder_of(fresh, "full", (1, tokens))
    with pytest.raises(ValueError, match=r"generate: found steps of .2, 4. tokens, expected one"):
        next(decoder_of(fresh, "full", (2, 4)).generate(1, Sampler(GREEDY), 4))
    decoder = decoder_of(fresh, "full", (1, 4))
    with pytest.raises(ValueError, match="token_ids: found 2 tokens, expected 1 or 4 as captured"):
        decoder.replay([1, 2], fresh.position)
    decoder.replay(5, 0)
    with pytest.raises(ValueError, match="position: found 7, expected 0 to 1"):
        decoder.replay(1, 7)
    fresh.state.set_position(fresh.max_context)
    with pytest.raises(ValueError, match=f"position: found {fresh.max_context} . 1 tokens"):
        decoder.replay(1, fresh.max_context)
    with pytest.raises(ValueError, match=f"position: found {fresh.max_context} . 1 tokens"):
        decoder_of(fresh, "full")
    with pytest.raises(UserError, match="found the torch ops, expected 'cuda'"):
        load(ops="torch", cuda_graph="full")


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_capture_leaves_eager_steps(
    fresh: Engine, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fresh.decode([5]).clone()
    fresh.reset()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CapturedStep, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder_of(fresh, mode)
    assert fresh.position == 0
    assert torch.equal(bits(fresh.decode([5])), bits(expected))
    fresh.reset()
    assert torch.equal(bits(decoder_of(fresh, mode).replay(5, 0)), bits(expected))


def test_nan_logits_end_it_by_name(eager: Engine) -> None:
    broken = load(cuda_graph="full")
    broken.model.head.norm.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"NaN in hidden at position \d+"):
        list(broken.generate(PROMPTS["capitals"], 8, GREEDY))
    broken = load(cuda_graph="full")
    tokens = broken.generate(PROMPTS["capitals"], 30, GREEDY, stop_token_ids=())
    next(tokens)
    broken.model.head.norm.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"NaN in hidden at position \d+"):
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
    last = LAYERS - 1
    if mode == "full":
        expected = [f"layers 0 to {last}, head, sample"]
    else:
        expected = [f"layer {layer} graph {part}" for layer in range(LAYERS) for part in "AB"]
        expected += [f"layer {last} mix", "head, sample"]
    assert regions.regions == tuple(expected)


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
    assert {int(position_1) for position_1 in engine.state.positions_1.values()} == {
        len(prompt) + 1
    }


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
