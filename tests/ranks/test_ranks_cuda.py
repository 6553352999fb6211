"""Both ranks of the demo on one stream of one GPU: real kernels and inboxes, without the wait for
another GPU.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.step.captured import capture_graph
from tests.decode.demo import GREEDY, PROMPTS, load
from tests.ranks.on_gpu import (
    IDS,
    bits,
    caches,
    decoded,
    different_caches,
    lock_step,
    mixed_steps,
    one_stream,
    same,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shared() -> Engine:
    return one_stream()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.reset()
    yield shared
    shared.reset()


def test_ranks_hold_the_same_bits_whatever_the_steps_are(engine: Engine) -> None:
    """Logits of every step (``decoded``), and the caches behind all of them."""
    assert not any(bool(rows.isnan().any()) for rows in mixed_steps(engine))
    assert caches(engine, 0).keys() == caches(engine, 1).keys()
    assert different_caches(engine, engine) == []


def test_steps_are_repeatable(engine: Engine) -> None:
    expected = mixed_steps(engine)
    for _ in range(3):
        assert same(mixed_steps(engine), expected)


def relative_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Over all logits of all steps."""
    pairs = [(one.double(), two.double()) for one, two in zip(found, exact, strict=True)]
    squares = [float((one - two).square().sum()) for one, two in pairs]
    return math.sqrt(sum(squares) / sum(float(two.square().sum()) for _, two in pairs))


def test_the_error_is_that_of_a_lone_rank() -> None:
    """Ranks round where a lone one rounds, and add in float32 in another order. So they are as far
    from the model computed in float32 on the same key rows, up to the luck of single roundings:
    at most twice as far.
    """
    found = whole_steps(one_stream())
    lone = whole_steps(load())
    exact = whole_steps(load(device="cpu", compute_dtype="float32", kv_dtype="fp8"))
    assert relative_error(found, exact) <= 2 * relative_error(lone, exact)


def whole_steps(engine: Engine) -> list[Tensor]:
    """Logits of a prompt and of steps behind it."""
    engine.reset()
    engine.prefill(IDS[:120])
    return [engine.decode(IDS[start : start + 4]).float().cpu() for start in range(120, 160, 4)]


@pytest.mark.parametrize("word", [-1, 0x3F80_0000, 0x7FC0_0000, (1 << 32) | 0x7FC0_0000])
def test_what_inboxes_held_before_is_never_read(engine: Engine, word: int) -> None:
    """Bytes of 0xFF, words without a tag, and NaN of the first exchange of another step."""
    expected = mixed_steps(engine)
    poison(engine, word)
    assert same(mixed_steps(engine), expected)


def poison(engine: Engine, word: int | None) -> None:
    """None: random words, of which no tag is that of a step to come."""
    torch.cuda.synchronize()
    for rank in engine.state.ranks:
        assert rank.peers is not None
        if word is None:
            rank.peers.inbox.random_(1 << 60, 1 << 61)
        else:
            rank.peers.inbox.fill_(word)
        rank.peers.partials_STE.fill_(math.nan)
        rank.peers.inputs_TE.fill_(math.nan)
        rank.peers.chosen_TK.fill_(1 << 40)


def test_random_words_and_those_of_other_steps_are_never_read(engine: Engine) -> None:
    expected = mixed_steps(engine)
    poison(engine, None)
    assert same(mixed_steps(engine), expected)
    # Those of the same exchanges in steps long ago.
    engine.state._steps_begun += 1 << 16
    assert same(mixed_steps(engine), expected)
    # And where the numbers of steps begin again.
    engine.state._steps_begun = (1 << 24) - 5
    assert same(mixed_steps(engine), expected)


def test_a_graph_of_both_ranks_replays_the_eager_steps(engine: Engine) -> None:
    engine.prefill(IDS[:120])
    expected = [decoded(engine, [token]) for token in IDS[120:132]]
    step = lock_step(engine, 1)
    assert step.feed is not None
    stream = torch.cuda.Stream(0)
    with torch.inference_mode(), torch.cuda.stream(stream):
        torch.cuda.synchronize()
        graph = capture_graph(stream, torch.cuda.graph_pool_handle(), lambda: step.run(1))
        engine.reset()
        engine.prefill(IDS[:120])
        found = []
        for token in IDS[120:132]:
            step.feed.put([token])
            engine.state.begin_step(1)
            graph.replay()
            engine.state.advance(1)
            torch.cuda.synchronize()
            found.append(step.logits_TV.cpu())
            for rank in step.ranks:
                assert torch.equal(bits(rank.logits_TV.cpu()), bits(found[-1]))
    assert same(found, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_of_one_rank_is_an_error_and_the_engine_goes_on(engine: Engine, rank: int) -> None:
    prompt = PROMPTS["capitals"]
    expected = list(engine.generate(prompt, 12, GREEDY, stop_token_ids=()))
    sink = engine.models[rank].blocks[2].attn.sink_H
    kept = sink.clone()
    sink.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"^NaN in layers\.2\.attn\.heads at position 0$"):
        list(engine.generate(prompt, 12, GREEDY, stop_token_ids=()))
    sink.copy_(kept)
    assert list(engine.generate(prompt, 12, GREEDY, stop_token_ids=())) == expected


def test_traced_values_are_whole(engine: Engine) -> None:
    """Shapes of a lone rank's, and heads that are not those of one rank twice."""
    ids = IDS[:20]
    expected = load().trace(ids, prompt_tokens=12)
    found = engine.trace(ids, prompt_tokens=12)
    assert {name: rows.shape for name, rows in found.items()} == {
        name: rows.shape for name, rows in expected.items()
    }
    heads = found["layers.0.attn.heads"].float()
    torch.testing.assert_close(heads, expected["layers.0.attn.heads"].float(), rtol=0.1, atol=0.1)
    half = heads.shape[1] // 2
    assert not torch.equal(heads[:, :half], heads[:, half:])


def test_generations_are_closed_and_begun_again(engine: Engine) -> None:
    """Steps queued in vain are taken back on both ranks."""
    prompt = PROMPTS["stories"]
    expected = list(engine.generate(prompt, 24, GREEDY, stop_token_ids=()))
    for count in (1, 2, 5):
        tokens = engine.generate(prompt, 24, GREEDY, stop_token_ids=())
        assert [next(tokens) for _ in range(count)] == expected[:count]
        tokens.close()
        follow = [*prompt, *expected[:count]]
        answer = list(engine.generate(follow, 4, GREEDY, stop_token_ids=(), reuse=True))
        assert answer == expected[count : count + 4]
    assert different_caches(engine, engine) == []
