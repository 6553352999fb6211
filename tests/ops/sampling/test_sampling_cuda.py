"""The sampling kernel against the torch op on the same logits, at the real vocabulary's size."""

import pytest
import torch
from torch import Tensor

from dsv4.ops import sampling as reference
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.sampling import cuda
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison

pytestmark = pytest.mark.gpu

VOCABULARY = 129_280
SIZES = [1, 3, 4, 31, 1000, 4097, 70_000, 129_279, VOCABULARY, 131_073, 196_608]


def random_logits(size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, generator=generator).cuda() * scale


def position(value: int) -> Tensor:
    return torch.tensor([value], device="cuda")


# (temperature, top_p, min_p, top_k)
Settings = tuple[float, float, float, int]


def settings(chosen: Settings, device: str = "cuda") -> Tensor:
    return torch.tensor(chosen, dtype=torch.float32, device=device)


def sample_token(logits_V: Tensor, chosen: Settings, seed: int, position_1: Tensor) -> Tensor:
    settings_4 = settings(chosen)
    return immediately(cuda.sample_token)(logits_V, settings_4, position(seed), position_1)


def argmax_token(logits_V: Tensor) -> Tensor:
    return sample_token(logits_V, (0.0, 1.0, 0.0, 0), 0, position(0))


def same_on_cpu(logits_V: Tensor, chosen: Settings, seed: int, at: int) -> int:
    """The torch op on the CPU, whose logarithms and division are correctly rounded."""
    settings_4 = settings(chosen, "cpu")
    seed_1 = torch.tensor([seed])
    position_1 = torch.tensor([at])
    return int(reference.sample_token(logits_V.cpu(), settings_4, seed_1, position_1))


@pytest.mark.parametrize("size", SIZES)
def test_argmax(size: int) -> None:
    for seed in range(5):
        logits_V = random_logits(size, seed)
        poison(1 << 20)
        token = argmax_token(logits_V)
        assert (token.dtype, token.shape, token.device) == (torch.int64, (), logits_V.device)
        assert int(token) == int(logits_V.cpu().argmax())
        logits_V[:] = -1.5
        logits_V[size // 3 :: 7] = 2.5
        assert int(argmax_token(logits_V)) == size // 3


def test_argmax_of_special_values() -> None:
    logits_V = torch.full((VOCABULARY,), -torch.inf, device="cuda")
    assert int(argmax_token(logits_V)) == reference.NAN_TOKEN
    logits_V[77_777] = -3e38
    assert int(argmax_token(logits_V)) == 77_777
    logits_V[:] = -0.0
    logits_V[5] = 0.0
    assert int(argmax_token(logits_V)) == 0, "both zeros are the same"
    infinite_V = logits_V.clone()
    infinite_V[9] = torch.inf
    assert int(argmax_token(infinite_V)) == reference.NAN_TOKEN
    for index in (0, 4099, VOCABULARY - 1):
        poisoned_V = logits_V.clone()
        poisoned_V[index] = -torch.nan
        assert int(argmax_token(poisoned_V)) == reference.NAN_TOKEN
        assert (
            int(sample_token(poisoned_V, (1.0, 0.9, 0.1, 7), 1, position(0))) == reference.NAN_TOKEN
        )


def test_misaligned_logits() -> None:
    logits_V = random_logits(VOCABULARY + 1)[1:]
    assert int(argmax_token(logits_V)) == int(logits_V.argmax())
    assert int(sample_token(logits_V, (1.0, 0.9, 0.0, 0), 3, position(4))) == same_on_cpu(
        logits_V, (1.0, 0.9, 0.0, 0), 3, 4
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_draws_are_those_of_the_torch_op(size: int, min_p: float) -> None:
    logits_V = random_logits(size)
    for at, seed in (
        (0, 0),
        (1, 7),
        (4095, 2**63 - 1),
        (1_000_000, 2**40 + 5),
        (17, 2**32),
        (3, 12345),
    ):
        for temperature in (1.0, 0.6, 1.7):
            chosen = temperature, 1.0, min_p, 0
            token = int(sample_token(logits_V, chosen, seed, position(at)))
            assert token == same_on_cpu(logits_V, chosen, seed, at)


@pytest.mark.parametrize("size", [3, 1000, VOCABULARY])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p_draws_are_those_of_the_torch_op(size: int, top_p: float) -> None:
    """Another token is allowed only within rounding of the edge: none is with these logits."""
    for seed in range(6):
        logits_V = random_logits(size, seed)
        chosen = 0.8, top_p, 0.0, 0
        token = int(sample_token(logits_V, chosen, seed, position(seed)))
        assert token == same_on_cpu(logits_V, chosen, seed, seed)


@pytest.mark.parametrize("size", [3, 31, 1000, 4097, VOCABULARY, 196_608])
@pytest.mark.parametrize("top_k", [1, 2, 20, 999, 4096, 129_279, 129_280, 1 << 24])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_top_k_draws_are_those_of_the_torch_op(size: int, top_k: int, top_p: float) -> None:
    """A high temperature, so that the tokens at the edge are drawn."""
    for seed in range(4):
        logits_V = random_logits(size, seed)
        chosen = 20.0, top_p, 0.0, top_k
        token = int(sample_token(logits_V, chosen, seed, position(seed)))
        assert token == same_on_cpu(logits_V, chosen, seed, seed)


@pytest.mark.parametrize("top_k", [1, 5, 1000, 64_639, 64_640, 64_641, 129_279])
def test_top_k_among_ties_is_that_of_the_torch_op(top_k: int) -> None:
    """Few different values, both zeros and −∞ among them: most edges are ties across blocks."""
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 1e-40, 2.0])
    generator = torch.Generator("cpu").manual_seed(top_k)
    logits_V = values[torch.randint(6, (VOCABULARY,), generator=generator)].cuda()
    for at in range(24):
        chosen = 1e4, 1.0, 0.0, top_k
        token = int(sample_token(logits_V, chosen, at, position(at)))
        assert token == same_on_cpu(logits_V, chosen, at, at)


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    logits_V = torch.zeros(VOCABULARY, device="cuda")
    chosen = 1.0, 1.0, 0.0, 10
    found = {int(sample_token(logits_V, chosen, 3, position(at))) for at in range(300)}
    assert found == set(range(10))


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.750001, 1e-9])
def test_top_p_of_a_flat_distribution_keeps_the_lowest_ids(top_p: float) -> None:
    """All tie, so the edge is drawn by id: no token beyond top_p · V, and tokens up to it."""
    logits_V = torch.zeros(VOCABULARY, device="cuda")
    size = VOCABULARY
    chosen = 1.0, top_p, 0.0, 0
    found = [int(sample_token(logits_V, chosen, seed, position(0))) for seed in range(64)]
    assert max(found) < max(1, top_p * size + 1)
    assert max(found) >= (top_p * size) * 0.9 - 1


def test_ties_at_the_edge_across_threads_and_blocks() -> None:
    """8 tokens of equal weight spread over the vocabulary: top-p 0.6 keeps the first five."""
    logits_V = torch.full((VOCABULARY,), -torch.inf, device="cuda")
    ids = [3, 20_000, 20_001, 40_000, 70_000, 90_000, 90_001, VOCABULARY - 1]
    logits_V[ids] = 1.25
    chosen = 1.0, 0.6, 0.0, 0
    found = {int(sample_token(logits_V, chosen, 5, position(at))) for at in range(200)}
    assert found == set(ids[:5])


def test_no_distribution_gives_the_nan_token() -> None:
    logits_V = random_logits(VOCABULARY)
    logits_V[100] = torch.inf
    assert int(sample_token(logits_V, (1.0, 1.0, 0.0, 0), 1, position(0))) == reference.NAN_TOKEN
    logits_V[:] = -torch.inf
    assert int(sample_token(logits_V, (1.0, 0.5, 0.0, 3), 1, position(0))) == reference.NAN_TOKEN


# Greedy, a draw, and two that are restricted.
SETTINGS: tuple[Settings, ...] = (
    (0.0, 1.0, 0.0, 0),
    (1.0, 1.0, 0.0, 0),
    (1.0, 0.9, 0.02, 0),
    (1.0, 0.9, 0.02, 50),
)


def prepared_op(logits_V: Tensor) -> tuple[PreparedOp, Tensor, Tensor, Tensor]:
    """The op, and the settings, the seed and the position that it reads."""
    read = settings(SETTINGS[1]), position(3), position(5)
    return PreparedOp(cuda.sample_token, logits_V, *read), *read


@pytest.mark.parametrize("chosen", SETTINGS)
def test_replay_is_the_eager_call(chosen: Settings) -> None:
    prepared, settings_4, _, _ = prepared_op(random_logits(VOCABULARY))
    settings_4.copy_(settings(chosen))
    prepared.run()
    assert_no_synchronisation(prepared.run)
    assert_replay_is_eager(lambda: prepared.run().reshape(1))


def test_one_captured_graph_serves_every_sampler_and_position() -> None:
    logits_V = random_logits(VOCABULARY)
    prepared, settings_4, seed_1, position_1 = prepared_op(logits_V)
    prepared.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = prepared.run()
    for at in range(12):
        for chosen in SETTINGS:
            for seed in (0, 3, 2**40 + at):
                settings_4.copy_(settings(chosen))
                seed_1.fill_(seed)
                position_1.fill_(at)
                graph.replay()
                assert int(token) == same_on_cpu(logits_V, chosen, seed, at)
