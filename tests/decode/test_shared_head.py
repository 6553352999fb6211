"""The demo on two GPUs that share the rows of the head: every way to decode has the same bits, and
they are no further from those of one GPU than another order of sums takes them.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.decode import Mode
from dsv4.measure.graph_profile import profile_decoder
from dsv4.parallel import head_shares
from dsv4.weights.shared_rows import shares_of
from tests.decode.demo import GREEDY, MODES, PROMPTS, bits, decoder_of, load, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPT = PROMPTS["stories"]
NO_STOP: frozenset[int] = frozenset()
LENGTHS = (1, 2, 1, 5, 8, 3)


@pytest.fixture(scope="module", params=["pipeline", "round-robin"])
def shared(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The head of the demo is too small to be shared otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_shares, "HEAD_START_BYTES", 0)
        yield load(gpus=2, parallel=request.param)


def poison(engine: Engine) -> None:
    """What an earlier step left is no result of this one."""
    assert engine.state.channels is not None
    for channel in engine.state.channels.all:
        channel.words_W.fill_(-1)


def decoded(engine: Engine) -> list[Tensor]:
    """Logits of steps of all lengths, with tokens taken back in between."""
    start(engine, PROMPT)
    found = []
    for length in LENGTHS:
        if engine.state.channels is not None:
            poison(engine)
        found.append(engine.decode(PROMPT[:length]).cpu())
        engine.rewind(length // 2)
    return found


def test_the_head_is_shared(shared: Engine) -> None:
    for index, share in enumerate(shares_of(shared.model.head.lm_head)):
        assert share.device.index == share.rows.data.device.index == index
        assert (share.first, share.rows.shape[0]) == (1280 * index, 1280)


def test_logits_are_those_of_one_gpu_but_for_the_order_of_sums(
    shared: Engine, eager: Engine
) -> None:
    for found, expected in zip(decoded(shared), decoded(eager), strict=True):
        peak = float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * peak)


@pytest.mark.parametrize("mode", MODES)
def test_replays_have_the_bits_of_eager_steps(shared: Engine, mode: Mode) -> None:
    decoder = decoder_of(shared, mode, (1, 2, 5))
    for length in (1, 2, 5):
        start(shared, PROMPT)
        expected = [shared.decode(PROMPT[at : at + length]).cpu() for at in (0, 5, 10)]
        start(shared, PROMPT)
        position = shared.position
        for step, at in enumerate((0, 5, 10)):
            poison(shared)
            found = decoder.replay(PROMPT[at : at + length], position + step * length)
            assert torch.equal(bits(found.cpu()), bits(expected[step]))


@pytest.mark.parametrize("mode", MODES)
def test_generations_are_the_eager_ones(shared: Engine, mode: Mode, eager: Engine) -> None:
    for prompt in PROMPTS.values():
        expected = list(shared.generate(prompt, 60, GREEDY, NO_STOP))
        assert expected == list(eager.generate(prompt, 60, GREEDY, NO_STOP))
        shared.decoder = decoder_of(shared, mode)
        poison(shared)
        assert list(shared.generate(prompt, 60, GREEDY, NO_STOP)) == expected
        shared.decoder = None


@pytest.mark.parametrize("mode", MODES)
def test_a_profile_names_the_products_of_both(shared: Engine, mode: Mode) -> None:
    start(shared, PROMPT)
    (timeline,) = profile_decoder(shared, decoder_of(shared, mode)).ranks
    heads = [node for node in timeline.nodes if node.part == "head"]
    moved = [(node.device, node.name) for node in heads if node.name.endswith("_rows")]
    ends = [(device, name) for device in (0, 1) for name in ("receive_rows", "send_rows")]
    assert sorted(moved) == ends
    products = [node.device for node in heads if node.name == "decode_linear"]
    assert sorted(products) == [0, 1]
    assert sum(row.us for row in timeline.rows()) == pytest.approx(timeline.us, rel=1e-6)


def test_traces_show_the_logits_of_both(shared: Engine, eager: Engine) -> None:
    ids = PROMPT[:12]
    found, expected = (
        engine.trace(ids, at=["hidden", "logits"], prompt_tokens=4) for engine in (shared, eager)
    )
    assert torch.equal(found["hidden"], expected["hidden"])
    peak = float(expected["logits"].abs().max())
    assert torch.allclose(found["logits"], expected["logits"], rtol=0, atol=64 * 2.0**-24 * peak)


def test_known_tokens_queued_without_waiting(shared: Engine) -> None:
    """Steps that depend on nothing of each other's results share the same memory."""
    start(shared, PROMPT)
    expected = [shared.decode([token]).clone() for token in PROMPT[:40]]
    start(shared, PROMPT)
    for token in PROMPT[:40]:
        found = shared.decode([token])
    assert torch.equal(bits(found), bits(expected[-1]))


def test_nan_on_the_other_device_is_found(shared: Engine) -> None:
    rows = shares_of(shared.model.head.lm_head)[0].rows.data
    saved = rows.clone()
    rows.view(torch.bfloat16).fill_(torch.nan)
    try:
        # The step that looks for its name multiplies the whole head.
        with pytest.raises(FloatingPointError, match="NaN or infinity after 20 tokens"):
            list(shared.generate(PROMPT, 10, GREEDY, NO_STOP))
    finally:
        rows.copy_(saved)
    shared.reset()
    assert len(list(shared.generate(PROMPT, 10, GREEDY, NO_STOP))) == 10
