"""SamplingParams and the sampler that applies them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.errors import UserError
from dsv4.ops import TORCH
from dsv4.ops.sampling import NAN_TOKEN
from dsv4.sampling import Sampler, SamplingParams


def position(value: int) -> torch.Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, -1.0, 1.01, math.nan)),
        *(("min_p", value) for value in (-0.01, 1.01, math.nan)),
        *(("seed", value) for value in (-1, 2**63)),
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
    ],
)
def test_the_ends_of_the_ranges_are_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: params.__dict__[name] for name in fields} == fields


def test_defaults_are_the_models_own() -> None:
    assert SamplingParams() == SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0, seed=None)


def test_temperature_zero_is_greedy_at_every_position() -> None:
    sampler, logits_V = Sampler(SamplingParams(temperature=0.0, seed=1), TORCH), torch.tensor([1.0, 5.0, 5.0, 2.0])
    assert {int(sampler(logits_V, position(p))) for p in range(50)} == {1}


def test_the_op_gets_all_parameters() -> None:
    seen: list[tuple[Any, ...]] = []

    def record(logits_V: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append(arguments)
        return torch.tensor(0)

    at = position(9)
    Sampler(SamplingParams(0.7, 0.9, 0.1, 2**40), replace(TORCH, sample_token=record))(torch.zeros(4), at)
    assert seen == [(0.7, 0.9, 0.1, 2**40, at)]


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    logits_V = torch.zeros(10_000)

    def run(sampler: Sampler) -> list[int]:
        return [int(sampler(logits_V, position(p))) for p in range(8)]

    assert run(Sampler(SamplingParams(seed=3), TORCH)) == run(Sampler(SamplingParams(seed=3), TORCH))
    fresh = [Sampler(SamplingParams(), TORCH) for _ in range(2)]
    assert fresh[0].seed != fresh[1].seed
    assert run(fresh[0]) != run(fresh[1])
    assert run(fresh[0]) == run(Sampler(SamplingParams(seed=fresh[0].seed), TORCH)), "a drawn seed can be given back"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_reported(temperature: float) -> None:
    logits_V = torch.tensor([0.0, math.nan])
    assert int(Sampler(SamplingParams(temperature=temperature), TORCH)(logits_V, position(0))) == NAN_TOKEN
