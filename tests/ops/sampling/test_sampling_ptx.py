"""A token's choice, executed on the CPU by a whole cluster: it is that of the torch op, with seeds
that would draw one of the tokens that are left out.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import sampling as reference
from dsv4.ops.sampling import cuda
from tests.ops.cases import normal
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

POSITION = 1_000_003
ALL = 1.0
FAULTS = {
    "other blocks have no logits": SourceEdit(
        "logits.cuh", "key = max(key, cluster.keys[half][b])", "key = max(key, 0ull)"
    ),
    "one equal logit too many": SourceEdit(
        "logits.cuh", "last, next, k - above,", "last, next, k - above + 1,"
    ),
}


class Settings(NamedTuple):
    temperature: float = 0.0
    top_p: float = ALL
    min_p: float = 0.0
    top_k: float = 0.0


def expected(logits_V: Tensor, chosen: Settings, seed: int = 0) -> int:
    at = torch.tensor([POSITION])
    return int(reference.sample_token(logits_V, torch.tensor(chosen), torch.tensor([seed]), at))


def found(
    logits_V: Tensor,
    chosen: Settings,
    seed: int = 0,
    edit: SourceEdit | None = None,
) -> int:
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), 1)
    place = torch.tensor([seed]), torch.tensor([POSITION])
    token = cuda.sample_token(recording, logits_V, torch.tensor(chosen), *place)
    return int(execute(recording, 1, edit)(token))


def telling_seed(logits_V: Tensor, chosen: Settings, looser: Settings) -> int:
    """A large one, with which the looser settings give another token."""
    seeds = (seed << 33 | 77 + seed for seed in range(2000))
    return next(
        seed
        for seed in seeds
        if expected(logits_V, chosen, seed) != expected(logits_V, looser, seed)
    )


def assert_drawn(
    logits_V: Tensor, chosen: Settings, looser: Settings, edit: SourceEdit | None = None
) -> None:
    seed = telling_seed(logits_V, chosen, looser)
    assert found(logits_V, chosen, seed, edit=edit) == expected(logits_V, chosen, seed)


@pytest.fixture
def small_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks: their exchanges take a quarter of the time."""
    monkeypatch.setattr(cuda, "_BLOCKS", 2)


def largest_at_the_end() -> Tensor:
    logits_V = normal(32_999, seed=1)
    logits_V[[31_000, 32_000]] = 7.0
    return logits_V


@pytest.mark.slow
def test_a_cluster_of_eight_blocks() -> None:
    """Greedy, and drawn of all tokens: of a vocabulary that no load of four divides."""
    logits_V = largest_at_the_end()
    assert found(logits_V, Settings()) == 31_000
    chosen = Settings(temperature=1.5, min_p=0.001)
    seed = 2**63 - 1
    assert found(logits_V, chosen, seed) == expected(logits_V, chosen, seed)


@pytest.mark.slow
def test_top_p_in_four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_BLOCKS", 4)
    logits_V = normal(16_000, seed=2)
    assert_drawn(logits_V, Settings(1.0, top_p=0.5), Settings(1.0, top_p=0.8))


SPECIAL = {
    "nan": ([(7000, -torch.nan)], -1),
    "infinity": ([(7001, torch.inf)], -1),
    "minus infinity": ([(slice(None), -torch.inf)], -1),
    "one": ([(slice(None), -torch.inf), (7002, -3e38)], 7002),
    "zeros": ([(slice(None), -0.0), (7003, 0.0)], 0),
}


@pytest.mark.usefixtures("small_cluster")
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_values(kind: str) -> None:
    logits_V = normal(8004, seed=3)
    changes, token = SPECIAL[kind]
    for where, value in changes:
        logits_V[where] = value
    assert expected(logits_V, Settings()) == token
    assert found(logits_V, Settings()) == token
    if token < 0:
        assert found(logits_V, Settings(1.0, 0.9, 0.1, 7.0)) == token


def few_values() -> Tensor:
    """Equal ones on both sides of the border between the blocks."""
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 1e-40, 2.0])
    which_V = torch.randint(6, (4500,), generator=torch.Generator().manual_seed(4))
    which_V[:4000] = 1
    return values[which_V]


def largest_in(block: int) -> Tensor:
    """Of 4096 tokens."""
    logits_V = normal(5000, seed=9)
    logits_V[4096 * block + 500] = 7.0
    return logits_V


# Logits, settings, and those that keep a token more or some more.
DRAWS = {
    "greedy": (largest_in(block=1), Settings(), Settings(3.0)),
    "top-k of ties": (few_values(), Settings(1e4, top_k=40), Settings(1e4, top_k=41)),
    "top-p of ties": (torch.zeros(100), Settings(1.0, top_p=0.255), Settings(1.0, top_p=0.265)),
    "min-p": (normal(5000, seed=7), Settings(2.0, min_p=0.2), Settings(2.0, min_p=0.1)),
    "all": (normal(5000, seed=8), Settings(9.0, 0.7, 0.4, 50.0), Settings(9.0)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_cluster")
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_are_those_of_the_torch_op(kind: str) -> None:
    assert_drawn(*DRAWS[kind])


SEEN_BY = {
    "other blocks have no logits": "greedy",
    "one equal logit too many": "top-k of ties",
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_cluster")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_drawn(*DRAWS[SEEN_BY[fault]], FAULTS[fault])
