"""Hostile settings and token ids: a result or one clean line, never another exception."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import Engine, EngineConfig, SamplingParams, UserError
from tests.model.tiny import random_ids, small_config, tiny_engine

pytestmark = pytest.mark.slow

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(
        ["fp8", "bf16", "cpu", "auto", "cuda", "pipeline", "float32", "bfloat16", b"fp8", math.nan]
    ),
)
hostile = st.one_of(
    scalars, st.lists(scalars, max_size=2), st.tuples(scalars), st.dictionaries(st.text(), scalars)
)
ENGINE_FIELDS = list(EngineConfig.__dataclass_fields__)
SAMPLING_FIELDS = list(SamplingParams.__dataclass_fields__)


def refused_cleanly(make: Callable[[], Any]) -> Any:
    """The result, or None when it was refused with one line; any other exception fails the test."""
    try:
        return make()
    except UserError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return None


@given(st.dictionaries(st.sampled_from(ENGINE_FIELDS), hostile, max_size=3))
@settings(max_examples=100)
@example({"prefill_chunk": True})
@example({"draft_tokens": True})
@example({"draft": ["mtp"]})
@example({"draft_weights": 3})
@example({"max_context": 1.5})
@example({"kv_dtype": ["fp8"]})
def test_engine_config_takes_valid_values_or_refuses(values: dict[str, Any]) -> None:
    config = refused_cleanly(lambda: EngineConfig(**values))
    if config is not None:
        assert config.kv_dtype in ("fp8", "bf16")
        assert config.prefill_chunk is None or type(config.prefill_chunk) is int
        assert config.draft_tokens in (None, "auto") or type(config.draft_tokens) is int
        assert config.max_context is None or type(config.max_context) is int


@given(st.dictionaries(st.sampled_from(SAMPLING_FIELDS), hostile, max_size=3))
@settings(max_examples=100)
@example({"temperature": 10**400})
@example({"seed": 1.5})
@example({"top_p": "1"})
def test_sampling_params_take_valid_values_or_refuse(values: dict[str, Any]) -> None:
    params = refused_cleanly(lambda: SamplingParams(**values))
    if params is not None:
        assert 0 <= params.temperature < math.inf
        assert 0 < params.top_p <= 1
        assert params.seed is None or type(params.seed) is int


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(small_config((0, 4), 1), max_context=16, prefill_chunk=4)


token_lists = st.one_of(
    hostile,
    st.lists(st.integers(-2, 100), max_size=20),
    st.lists(st.integers(), max_size=3),
    st.lists(st.integers(0, 88).map(numpy.int64), max_size=3),
    st.lists(st.integers(0, 88), max_size=3).map(torch.tensor),
)


@given(token_lists)
@settings(max_examples=50)
@example([True])
@example([2**70])
@example(numpy.array([[1, 2]]))
@example(torch.tensor([1.0]))
def test_token_ids_are_used_or_refused(engine: Engine, token_ids: Any) -> None:
    for call in (engine.logits, engine.prefill, lambda ids: list(engine.generate(ids, 1))):
        engine.reset()
        if refused_cleanly(lambda call=call: call(token_ids)) is None:
            assert engine.position == 0
    assert torch.isfinite(engine.logits(random_ids(5))).all()


@given(st.lists(st.integers(-1, 9), max_size=6))
@settings(max_examples=100)
def test_chunk_sizes_are_used_or_refused(engine: Engine, chunk_sizes: list[int]) -> None:
    token_ids = random_ids(10)
    valid = sum(chunk_sizes) == 10 and all(size >= 1 for size in chunk_sizes)
    if valid:
        torch.testing.assert_close(
            engine.logits(token_ids, chunk_sizes), engine.logits(token_ids), rtol=1e-4, atol=1e-5
        )
        return
    with pytest.raises(ValueError, match="chunk_sizes: found"):
        engine.logits(token_ids, chunk_sizes)


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "rewind", "reset"]), st.integers(0, 9)),
        max_size=12,
    )
)
@settings(max_examples=30)
def test_any_order_of_calls_keeps_the_sequence_right(
    engine: Engine, calls: list[tuple[str, int]]
) -> None:
    # A model of the engine: the list of tokens it has been fed. Refused calls change nothing.
    engine.reset()
    tokens: list[int] = []
    for step, (name, count) in enumerate(calls):
        new = random_ids(count, seed=step)
        try:
            if name == "prefill":
                engine.prefill(new)
            elif name == "decode":
                engine.decode(new)
            elif name == "rewind":
                engine.rewind(count)
            else:
                engine.reset()
        except ValueError:
            assert engine.position == len(tokens)
            continue
        tokens = {"reset": [], "rewind": tokens[: len(tokens) - count]}.get(name, tokens + new)
        assert engine.position == len(tokens)
    if 0 < len(tokens) < engine.max_context:
        found = engine.decode([5])[0]
        torch.testing.assert_close(found, engine.logits([*tokens, 5])[-1], rtol=1e-4, atol=1e-5)
