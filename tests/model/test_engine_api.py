"""The public API: what Engine gives, what it refuses, and how a run ends."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import Engine, EngineConfig, ModelConfig, SamplingParams, UserError
from dsv4.checkpoint import write_synthetic
from dsv4.parallel.placement import Placement
from dsv4.validate.decode_checks import cache_tensors
from tests.model.tiny import CPU, random_ids, random_weights, raw_config, small_config, tiny_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=64, prefill_chunk=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_synthetic(path, raw_config(), "bf16", 0)
    return path


def test_everything_the_package_promises_is_there() -> None:
    import dsv4

    assert {"Engine", "EngineConfig", "ModelConfig", "SamplingParams"} <= set(dsv4.__all__)


def test_a_folder_loads_with_progress_and_with_default_settings(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = Engine.load(str(folder), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert engine.engine_config == EngineConfig(prefill_chunk=512)
    assert engine.max_context == 4096
    logits_TV = engine.logits([3, 4, 5])
    assert (logits_TV.dtype, tuple(logits_TV.shape)) == (
        torch.float32,
        (3, engine.config.vocab_size),
    )


def test_plan_and_load_agree_on_the_context_and_the_state(folder: Path) -> None:
    config = EngineConfig(device="cpu", max_context=100)
    plan = Engine.plan(folder, config)
    engine = Engine.load(folder, config)
    assert plan.max_context == engine.max_context == 100
    held = sum(cache.nbytes for _, cache in cache_tensors(engine.state))
    assert sum(device.state_bytes for device in plan.devices) == held


@pytest.mark.parametrize("make", [Engine.load, Engine.plan])
def test_what_is_no_folder_and_no_config_is_refused(make: Callable, folder: Path) -> None:
    for path in (None, 5, b"x", ["x"]):
        expected = re.escape(f"checkpoint: found {path!r}, expected the path of a folder")
        with pytest.raises(UserError, match=expected):
            make(path)
    for config in (5, {}, "", EngineConfig):
        expected = re.escape(f"config: found {config!r}, expected EngineConfig(...) or None")
        with pytest.raises(UserError, match=expected):
            make(folder, config)


def test_logits_of_chunks_and_trace_have_the_promised_shapes(engine: Engine) -> None:
    token_ids = random_ids(12)
    whole = engine.logits(token_ids)
    chunked = engine.logits(token_ids, chunk_sizes=[7, 3, 1, 1])
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
    trace = engine.trace(token_ids)
    assert [tuple(trace[f"layers.{layer}.streams"].shape) for layer in range(4)] == [
        (12, 4, 64)
    ] * 4
    assert tuple(trace["hidden"].shape) == (12, 64)
    assert torch.equal(trace["logits"], engine.logits(token_ids))


def test_prefill_then_decode_continue_one_sequence(engine: Engine) -> None:
    token_ids = random_ids(20)
    whole = engine.logits(token_ids)
    engine.reset()
    torch.testing.assert_close(engine.prefill(token_ids[:12]), whole[11], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(engine.decode(token_ids[12:]), whole[12:], rtol=1e-5, atol=1e-5)
    assert engine.position == 20


def test_ids_may_come_as_a_tensor_or_another_iterable(engine: Engine) -> None:
    token_ids = random_ids(5)
    expected = engine.logits(token_ids)
    for form in (
        tuple(token_ids),
        torch.tensor(token_ids),
        torch.tensor(token_ids).numpy(),
        iter(token_ids),
    ):
        assert torch.equal(engine.logits(form), expected)  # type: ignore[arg-type]


def test_greedy_follows_the_teacher_forced_logits(engine: Engine) -> None:
    prompt = random_ids(10)
    produced = list(engine.generate(prompt, 12, GREEDY, NO_STOP))
    best = engine.logits(prompt + produced).argmax(-1).tolist()
    assert produced == best[len(prompt) - 1 : -1]
    assert list(engine.generate(prompt, 12, GREEDY, NO_STOP)) == produced


@pytest.mark.slow
def test_equal_seeds_repeat_and_other_seeds_differ(engine: Engine) -> None:
    def sampled(seed: int | None) -> list[int]:
        return list(engine.generate(random_ids(10), 20, SamplingParams(seed=seed), NO_STOP))

    assert sampled(5) == sampled(5)
    assert sampled(5) != sampled(6)
    assert sampled(None) != sampled(None)


def test_sampling_restricted_to_the_best_token_is_greedy(engine: Engine) -> None:
    greedy = list(engine.generate(random_ids(10), 12, GREEDY, NO_STOP))
    for params in (SamplingParams(top_p=1e-9, seed=1), SamplingParams(min_p=1.0, seed=1)):
        assert list(engine.generate(random_ids(10), 12, params, NO_STOP)) == greedy


def test_a_stop_token_ends_the_run_and_is_not_yielded(engine: Engine) -> None:
    prompt = random_ids(10)
    free = list(engine.generate(prompt, 12, GREEDY, NO_STOP))
    stop = free[4]
    stopped = list(engine.generate(prompt, 12, GREEDY, stop_token_ids=[stop]))
    assert stopped == free[: free.index(stop)]
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "stop"
    assert engine.last_run.prefill_tokens == 10
    assert engine.last_run.decode_tokens == len(stopped)


def test_the_models_eos_stops_by_default() -> None:
    engine = tiny_engine()
    assert engine.config.eos_token_ids == (1,)
    free = list(engine.generate(random_ids(10), 1, GREEDY, NO_STOP))
    as_eos = tiny_engine(small_config(eos_token_id=[0, free[0]]))
    assert list(as_eos.generate(random_ids(10), 12, GREEDY)) == []
    assert as_eos.last_run is not None
    assert as_eos.last_run.finish_reason == "stop"


def test_the_limit_ends_the_run(engine: Engine) -> None:
    assert len(list(engine.generate(random_ids(10), 3, GREEDY, NO_STOP))) == 3
    assert engine.last_run is not None
    assert (engine.last_run.finish_reason, engine.last_run.decode_tokens) == ("length", 2)


def test_the_end_of_the_context_ends_the_run(engine: Engine) -> None:
    # 60 tokens of prompt leave room for 4 more; a fifth is sampled from the last position but
    # cannot be fed.
    assert len(list(engine.generate(random_ids(60), 100, GREEDY, NO_STOP))) == 5
    assert engine.last_run is not None
    assert engine.last_run.finish_reason == "context"
    assert len(list(engine.generate(random_ids(64), 100, GREEDY, NO_STOP))) == 1


def test_closing_the_iterator_early_keeps_the_statistics(engine: Engine) -> None:
    run = engine.generate(random_ids(10), 50, GREEDY, NO_STOP)
    for _ in range(3):
        next(run)
    run.close()
    assert engine.last_run is not None
    assert engine.last_run.decode_tokens == 2
    assert engine.last_run.finish_reason == "interrupted"
    assert engine.last_run.prefill_seconds > 0


def test_using_the_engine_before_the_first_token_does_not_disturb_a_run(engine: Engine) -> None:
    expected = list(engine.generate(random_ids(10), 5, GREEDY, NO_STOP))
    run = engine.generate(random_ids(10), 5, GREEDY, NO_STOP)
    engine.logits(random_ids(30, seed=1))
    assert list(run) == expected


def test_prefill_progress_counts_tokens(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    next(
        engine.generate(
            random_ids(19), 1, GREEDY, NO_STOP, lambda done, total: seen.append((done, total))
        )
    )
    assert seen == [(8, 19), (16, 19), (19, 19)]


REFUSED: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "empty prompt": (lambda e: e.generate([], 1), "token_ids: found none"),
    "empty logits": (lambda e: e.logits([]), "token_ids: found none"),
    "empty decode": (lambda e: e.decode([]), "token_ids: found none"),
    "id beyond the vocabulary": (
        lambda e: e.logits([3, 89]),
        "found 89, expected ids from 0 to 88",
    ),
    "negative id": (lambda e: e.trace([-1]), "found -1, expected ids from 0 to 88"),
    "id that is no integer": (lambda e: e.prefill([1.5]), "expected integers"),  # type: ignore[list-item]
    "text instead of ids": (lambda e: e.prefill("ab"), "expected integers"),  # type: ignore[arg-type]
    "prompt beyond the context": (
        lambda e: e.generate(random_ids(65), 1),
        "65 tokens, expected at most 64",
    ),
    "nine tokens at once": (lambda e: e.decode(random_ids(9)), "found 9 tokens, expected 1 to 8"),
    "no new tokens": (lambda e: e.generate([3], 0), "max_new_tokens: found 0"),
    "new tokens that are no integer": (lambda e: e.generate([3], 2.5), "max_new_tokens: found 2.5"),  # type: ignore[arg-type]
    "chunks that do not add up": (
        lambda e: e.logits([3, 4, 5], [1, 1]),
        "chunk_sizes: found [1, 1]",
    ),
    "no chunks": (lambda e: e.logits([3, 4, 5], []), "chunk_sizes: found []"),
    "an empty chunk": (lambda e: e.logits([3, 4, 5], [3, 0]), "chunk_sizes: found [3, 0]"),
    "half a chunk": (lambda e: e.logits([3, 4, 5], [1.5, 1.5]), "chunk_sizes: found [1.5, 1.5]"),  # type: ignore[list-item]
    "a number of chunks": (lambda e: e.logits([3, 4, 5], 3), "chunk_sizes: found 3, expected"),  # type: ignore[arg-type]
    "a number to reuse": (lambda e: e.reusable_tokens(3), "token_ids: found 3, expected integers"),  # type: ignore[arg-type]
    "a state in no file": (lambda e: e.save_state(None), "save_state: found None, expected the"),  # type: ignore[arg-type]
    "a state of no file": (lambda e: e.load_state(3), "load_state: found 3, expected the name"),  # type: ignore[arg-type]
    "a file with a zero byte": (
        lambda e: e.save_state("a\0"),
        "save_state: found 'a\\x00', expected",
    ),
    "a file with a surrogate": (
        lambda e: e.load_state("\ud800"),
        "load_state: found '\\ud800', expected",
    ),
    "a pattern that is no text": (lambda e: e.trace([3], [5]), "at: found [5], expected"),  # type: ignore[list-item]
    "a number of patterns": (lambda e: e.trace([3], 3), "at: found 3, expected at least one"),  # type: ignore[arg-type]
    "patterns that can be read once": (lambda e: e.trace([3], iter("*")), "at: found <str"),  # type: ignore[arg-type]
    "fewer than no log-probabilities": (
        lambda e: e.prompt_logprobs([3, 4], -1),
        "count: found -1, expected an integer from 0 to 1000",
    ),
    "all log-probabilities": (lambda e: e.prompt_logprobs([3, 4], None), "count: found None"),  # type: ignore[arg-type]
    "half a position": (lambda e: e.rewind_to(0.5), "position: found 0.5, expected an integer"),  # type: ignore[arg-type]
    "a position before the beginning": (
        lambda e: e.rewind_to(-1),
        "position: found -1, expected an integer of at least 0",
    ),
    "a position that is a truth": (lambda e: e.rewind_to(False), "position: found False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_calls_are_refused_in_one_line(what: str, engine: Engine) -> None:
    call, message = REFUSED[what]
    engine.reset()
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call(engine)
    assert "\n" not in str(caught.value)
    assert engine.position == 0


def test_a_sequence_that_outgrows_the_context_is_refused_and_kept(engine: Engine) -> None:
    engine.reset()
    engine.prefill(random_ids(60))
    with pytest.raises(UserError, match="found a sequence of 66 tokens, expected at most 64"):
        engine.decode(random_ids(6))
    assert engine.position == 60
    engine.decode(random_ids(4))


def test_max_context_is_at_most_what_the_model_was_made_for() -> None:
    with pytest.raises(UserError, match="expected at most 4096"):
        tiny_engine(max_context=4097)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=0)], ids=["greedy", "sampled"])
def test_spec11_f40_nan_logits_stop_the_run_instead_of_giving_token_0(
    sampling: SamplingParams,
) -> None:
    config = ModelConfig.from_dict(small_config())
    weights = dict(random_weights(config))
    norm = weights["norm.weight"]
    assert isinstance(norm, torch.Tensor)
    weights["norm.weight"] = torch.full_like(norm, math.nan)
    engine = Engine(
        config, EngineConfig(device="cpu", max_context=64), weights, Placement.of_layers((CPU,) * 4)
    )
    with pytest.raises(FloatingPointError, match="NaN in hidden at position 0"):
        next(engine.generate(random_ids(5), 3, sampling))
