"""SamplingParams, the sampler that they make, and its settings on the device."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.errors import UserError
from dsv4.ops import TORCH
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.sampling import Sampler, SamplerState, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, -1.0, 1.01, math.nan)),
        *(("temperature", value) for value in (Fraction(10**400), "0.5")),
        *(("min_p", value) for value in (-0.01, 1.01, math.nan)),
        *(("seed", value) for value in (-1, 2**63)),
        *(("top_k", value) for value in (-1, 1.5, True)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{field}: found .*, expected ") as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 1},
        {"min_p": 0},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"top_k": 0},
        {"top_k": 10**9},
    ],
)
def test_the_ends_of_the_ranges_are_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: params.__dict__[name] for name in fields} == fields


def test_numbers_of_numpy_are_those_of_python() -> None:
    fields = {"temperature": 0.5, "top_p": 1, "min_p": 0.25, "seed": 2**62, "top_k": 3}
    types = {int: np.int64, float: np.float32}
    found = SamplingParams(**{name: types[type(one)](one) for name, one in fields.items()})  # type: ignore[arg-type]
    assert found == SamplingParams(**fields)  # type: ignore[arg-type]
    assert all(type(found.__dict__[name]) is type(one) for name, one in fields.items())
    with pytest.raises(UserError, match="top_k: found np.True_, expected an integer"):
        SamplingParams(top_k=np.True_)  # type: ignore[arg-type]


def test_defaults_are_the_models_own() -> None:
    assert SamplingParams() == SamplingParams(1.0, top_p=1.0, min_p=0.0, seed=None, top_k=0)


def test_settings_are_numbers_for_the_op() -> None:
    params = SamplingParams(0.7, 0.9, 0.1, 2**40, 50)
    assert Sampler(params).settings() == ((0.7, 0.9, 0.1, 50.0), 2**40)
    settings, seed = Sampler(SamplingParams(temperature=0)).settings()
    assert settings == (0.0, 1.0, 0.0, 0.0)
    assert all(isinstance(value, float) for value in settings)
    assert 0 <= seed < 2**63


def test_settings_stay_in_the_range_of_float32() -> None:
    """A small temperature is not greedy, a large one and a small top_p are numbers, a large top_k
    is an integer.
    """
    (*_, top_k), _ = Sampler(SamplingParams(top_k=10**40)).settings()
    assert float(torch.tensor(top_k)) == top_k > 10**7
    assert int(torch.tensor(top_k).int()) == top_k
    for temperature in (1e-60, 1e300):
        params = SamplingParams(temperature=temperature, top_p=1e-60)
        (found, top_p, *_), _ = Sampler(params).settings()
        stored = torch.tensor([found, top_p], dtype=torch.float32)
        assert bool((stored > 0).all())
        assert bool(stored.isfinite().all())


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    assert Sampler(SamplingParams(seed=3)).seed == Sampler(SamplingParams(seed=3)).seed == 3
    first, second = (Sampler(SamplingParams()) for _ in range(2))
    assert first.seed != second.seed
    given_back = Sampler(SamplingParams(seed=first.seed))
    assert given_back.settings() == first.settings(), "a drawn seed can be given back"


def next_tokens(state: SamplerState, logits_V: torch.Tensor, count: int) -> list[int]:
    places = (torch.tensor([at]) for at in range(count))
    settings = state.settings_4, state.seed_1
    return [int(TORCH.sample_token(logits_V, *settings, place)) for place in places]


def test_a_loaded_sampler_chooses_the_tokens() -> None:
    state = SamplerState.allocate(torch.device("cpu"))
    logits_V = torch.zeros(10_000)
    memory = state.settings_4.data_ptr(), state.seed_1.data_ptr()
    logits_V[[7, 9]] = 1.0
    assert (state.settings_4.dtype, state.settings_4.shape) == (torch.float32, (4,))
    assert (state.seed_1.dtype, state.seed_1.shape) == (torch.int64, (1,))
    assert set(next_tokens(state, logits_V, 20)) == {7}, "greedy until a sampler is loaded"
    state.load(Sampler(SamplingParams(seed=3)))
    first = next_tokens(state, logits_V, 8)
    state.load(Sampler(SamplingParams(0.7, 0.9, 0.1, 2**63 - 1, 50)))
    assert state.settings_4.tolist() == torch.tensor([0.7, 0.9, 0.1, 50]).tolist()
    assert state.seed_1.tolist() == [2**63 - 1]
    assert next_tokens(state, logits_V, 8) != first
    state.load(Sampler(SamplingParams(temperature=0.0, seed=1)))
    assert set(next_tokens(state, logits_V, 20)) == {7}
    state.load(Sampler(SamplingParams(seed=3)))
    assert next_tokens(state, logits_V, 8) == first
    assert (state.settings_4.data_ptr(), state.seed_1.data_ptr()) == memory


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_reported(temperature: float) -> None:
    state = SamplerState.allocate(torch.device("cpu"))
    state.load(Sampler(SamplingParams(temperature=temperature)))
    assert next_tokens(state, torch.tensor([0.0, math.nan]), 1) == [NAN_TOKEN]


@pytest.mark.gpu
def test_loads_that_follow_each_other_keep_their_order_without_waiting() -> None:
    """What is queued behind a load reads its settings, though the host is many loads ahead."""
    state = SamplerState.allocate(torch.device("cuda", torch.cuda.current_device()))
    found = []
    for seed in range(50):
        torch.cuda._sleep(100_000)
        state.load(Sampler(SamplingParams(temperature=0.5 + seed, seed=seed)))
        found.append((state.settings_4.clone(), state.seed_1.clone()))
    for seed, (settings_4, seed_1) in enumerate(found):
        assert settings_4.tolist() == [0.5 + seed, 1.0, 0.0, 0.0]
        assert seed_1.tolist() == [seed]
