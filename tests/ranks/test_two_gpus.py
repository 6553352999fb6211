"""A rank on each of two GPUs, in every way to decode: bit for bit what both ranks compute on one
stream of one GPU.
"""

from pathlib import Path
from typing import get_args

import pytest
import torch

from dsv4 import Engine
from dsv4.decode import Mode
from dsv4.sampling import SamplingParams
from dsv4.step.steps import RecordedSteps
from tests.decode.demo import GREEDY, PROMPTS, load
from tests.ranks.on_gpu import IDS, bits, different_caches, mixed_steps, one_stream, same, two_gpus
from tests.step.interrupted import interrupted_behind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
MODES: tuple[Mode, ...] = get_args(Mode)


@pytest.fixture(scope="module")
def eager() -> Engine:
    return two_gpus()


@pytest.fixture(scope="module")
def oracle() -> Engine:
    return one_stream(prefill_chunk=2048)


@pytest.fixture(scope="module", params=MODES)
def graph(request: pytest.FixtureRequest) -> Engine:
    return two_gpus(cuda_graph=request.param)


def test_two_gpus_equal_one_stream_bit_for_bit(eager: Engine, oracle: Engine) -> None:
    """Chunks, steps of 1 to 8 tokens, tokens that are taken back; and the caches of both ranks."""
    for _ in range(3):
        assert same(mixed_steps(eager), mixed_steps(oracle))
        assert different_caches(eager, oracle) == []
        assert different_caches(oracle, oracle) == []


def test_the_logits_of_a_whole_prompt_are_those_of_one_stream(
    eager: Engine, oracle: Engine
) -> None:
    """Logits of more than 8 tokens come in pieces, whose words follow each other at once."""
    assert torch.equal(bits(eager.logits(IDS).cpu()), bits(oracle.logits(IDS).cpu()))


def test_replays_equal_eager_steps_bit_for_bit(eager: Engine, graph: Engine) -> None:
    for engine in (eager, graph):
        engine.reset()
        engine.prefill(IDS[:120])
    for token in IDS[120:136]:
        assert torch.equal(bits(graph.decode([token]).cpu()), bits(eager.decode([token]).cpu()))
    for engine in (eager, graph):
        engine.rewind(5)
    for token in IDS[131:140]:
        assert torch.equal(bits(graph.decode([token]).cpu()), bits(eager.decode([token]).cpu()))
    assert different_caches(graph, eager) == []


def test_all_modes_generate_the_ids_of_one_stream(
    graph: Engine, eager: Engine, oracle: Engine
) -> None:
    for prompt in PROMPTS.values():
        for sampling in (GREEDY, SamplingParams(temperature=1.0, seed=3)):
            expected = list(oracle.generate(prompt, 40, sampling, stop_token_ids=()))
            for engine in (eager, graph):
                assert list(engine.generate(prompt, 40, sampling, stop_token_ids=())) == expected


def test_ids_differ_from_those_of_one_gpu_at_near_ties_alone(eager: Engine) -> None:
    """A rank adds in another order. Where that changes the choice, the two tokens are no further
    apart than the errors of both computations: at most twice that of one GPU for the ranks
    (``test_ranks_cuda``), for each of two logits.
    """
    lone = load()
    exact = load(device="cpu", compute_dtype="float32", kv_dtype="fp8")
    for prompt in PROMPTS.values():
        expected = list(lone.generate(prompt, 60, GREEDY, stop_token_ids=()))
        found = list(eager.generate(prompt, 60, GREEDY, stop_token_ids=()))
        pairs = zip(found, expected, strict=True)
        at = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
        if at is None:
            continue
        before = [*prompt, *expected[:at]]
        lone_V, exact_V = (one.logits(before)[-1].float().cpu() for one in (lone, exact))
        error = float((lone_V - exact_V).abs().max())
        margin = float(lone_V[expected[at]] - lone_V[found[at]])
        assert margin <= 2 * (1 + 2) * error, (at, margin, error)


def test_stops_leave_both_ranks_side_by_side(graph: Engine) -> None:
    prompt = PROMPTS["stories"]
    expected = list(graph.generate(prompt, 30, GREEDY, stop_token_ids=()))
    for count in (1, 3, 7):
        tokens = graph.generate(prompt, 30, GREEDY, stop_token_ids=())
        assert [next(tokens) for _ in range(count)] == expected[:count]
        tokens.close()
        assert different_caches(graph, graph) == []
    assert list(graph.generate(prompt, 30, GREEDY, stop_token_ids=())) == expected


def test_interrupted_logits_leave_both_ranks_side_by_side(eager: Engine, oracle: Engine) -> None:
    """Before, between and behind the first parts of both; the next step polls words again."""
    assert isinstance(eager.steps, RecordedSteps)
    for engine in (eager, oracle):
        engine.reset()
        engine.prefill(IDS[:20])
    for parts, token in enumerate(IDS[20:24]):
        hidden_TE = eager.steps.run([token]).clone()
        oracle.decode([token])
        with interrupted_behind(parts):
            eager.steps.logits(hidden_TE)
        assert torch.equal(bits(eager.decode([7]).cpu()), bits(oracle.decode([7]).cpu()))


def test_a_saved_sequence_goes_on_with_other_ranks(
    eager: Engine, oracle: Engine, tmp_path: Path
) -> None:
    """Bit for bit where the ranks are as many; with one GPU the rows are read and kept as they
    are.
    """
    lone = load()
    eager.reset()
    eager.prefill(IDS[:200])
    eager.save_state(tmp_path / "state")
    oracle.load_state(tmp_path / "state")
    lone.load_state(tmp_path / "state")
    lone.save_state(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
    for token in IDS[200:206]:
        found = eager.decode([token]).cpu()
        assert torch.equal(bits(found), bits(oracle.decode([token]).cpu()))
        other = lone.decode([token]).cpu()
        assert not bool(other.isnan().any())
        torch.testing.assert_close(found, other, rtol=0.1, atol=0.5)
    lone.save_state(tmp_path / "lone")
    eager.load_state(tmp_path / "lone")
    assert different_caches(eager, lone) == []


def test_traces_are_those_of_one_stream_in_every_mode(
    graph: Engine, eager: Engine, oracle: Engine
) -> None:
    ids = IDS[:24]
    expected = oracle.trace(ids, prompt_tokens=16)
    for engine in (eager, graph):
        found = engine.trace(ids, prompt_tokens=16)
        assert list(found) == list(expected)
        different = [name for name, rows in expected.items() if not torch.equal(found[name], rows)]
        assert different == []


def test_ranks_that_choose_other_tokens_are_noticed(eager: Engine) -> None:
    """The seed of one rank changes while it runs."""
    prompt = PROMPTS["stories"]
    expected = list(eager.generate(prompt, 12, GREEDY, stop_token_ids=()))
    assert isinstance(eager.steps, RecordedSteps)
    random = SamplingParams(temperature=2.0, seed=3)
    tokens = eager.generate(prompt, 200, random, stop_token_ids=())
    # The loop, which loads the seed, begins behind the first token.
    next(tokens)
    next(tokens)
    eager.steps.ranks[1].sampler.seed_1.fill_(99)
    with pytest.raises(RuntimeError, match=r"^ranks: found token \d+ of rank 1 at position \d+, "):
        list(tokens)
    assert list(eager.generate(prompt, 12, GREEDY, stop_token_ids=())) == expected
