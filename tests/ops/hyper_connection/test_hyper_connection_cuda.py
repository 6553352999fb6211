"""Hyper-connection kernels on real and odd shapes, against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection import HcHeadWeights, decode, prefill
from dsv4.ops.immediate import PreparedOp, immediately
from tests.ops.cases import EPS, HC_EPS, assert_rounded_once
from tests.ops.forms import by_tokens
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded, poison
from tests.ops.hyper_connection.exact import (
    MIX_BOUND,
    assert_normalised,
    assert_pre,
    exact_mixes,
    exact_parts,
    exact_post,
    mixing,
    normal,
    seam_weights,
)

pytestmark = pytest.mark.gpu

DECODE = [(1, 4, 7168), (2, 4, 7168), (8, 4, 7168), (1, 4, 4096), (7, 4, 4096)]
PREFILL = [
    (9, 4, 7168),
    (16, 4, 7168),
    (17, 4, 4096),
    (300, 4, 7168),
    (513, 4, 4096),
    (1100, 4, 7168),
]
ODD = [
    *(
        (1, 4, 2),
        (3, 4, 4),
        (1, 4, 96),
        (5, 1, 32),
        (2, 2, 64),
        (9, 3, 64),
        (8, 3, 200),
        (2, 8, 64),
    ),
    *(
        (20, 8, 192),
        (17, 4, 36),
        (33, 4, 40),
        (12, 2, 1000),
        (64, 1, 8),
        (1, 4, 16_384),
        (10, 4, 9000),
    ),
]
SHAPES = [*DECODE, *PREFILL, *ODD]
hc_pre = immediately(by_tokens(decode.hc_pre, prefill.hc_pre))
hc_seam = immediately(by_tokens(decode.hc_seam, prefill.hc_seam))
hc_post = immediately(by_tokens(decode.hc_post, prefill.hc_post))
hc_head = immediately(by_tokens(decode.hc_head, prefill.hc_head))


@pytest.fixture(autouse=True)
def on_the_gpu() -> None:
    torch.manual_seed(0)
    poison(8 << 20)


@pytest.mark.parametrize(("tokens", "streams", "width"), SHAPES)
def test_seam(tokens: int, streams: int, width: int) -> None:
    weights = seam_weights(streams, width)
    norm_weight = normal(width)
    y_TE = normal(tokens, width, dtype=torch.bfloat16)
    streams_TME = normal(tokens, streams, width).bfloat16()
    incoming = mixing(tokens, streams)
    before_TME = streams_TME.clone()
    found_TME, *found = hc_seam(y_TE, streams_TME, *incoming, weights, norm_weight)
    assert torch.equal(streams_TME, before_TME)
    assert_rounded_once(found_TME, exact_post(y_TE, streams_TME, *incoming))
    assert_pre(tuple(found), found_TME, weights, norm_weight)


@pytest.mark.parametrize(("tokens", "streams", "width"), SHAPES)
def test_pre_and_head(tokens: int, streams: int, width: int) -> None:
    weights = seam_weights(streams, width)
    norm_weight = normal(width)
    streams_TME = normal(tokens, streams, width).bfloat16()
    assert_pre(hc_pre(streams_TME, weights, norm_weight), streams_TME, weights, norm_weight)
    head = HcHeadWeights(
        weights.fn[:streams].contiguous(), normal(streams), torch.tensor([0.7]).cuda(), EPS, HC_EPS
    )
    pre_TM = (exact_mixes(streams_TME, head.fn) * 0.7 + head.base.double()).sigmoid() + HC_EPS
    assert_normalised(hc_head(streams_TME, head, norm_weight), pre_TM, streams_TME, norm_weight)


@pytest.mark.parametrize(("tokens", "streams", "width"), SHAPES)
def test_post(tokens: int, streams: int, width: int) -> None:
    y_TE = normal(tokens, width, dtype=torch.bfloat16)
    streams_TME = normal(tokens, streams, width).bfloat16()
    post_TM = normal(tokens, streams)
    comb_TMM = normal(tokens, streams, streams)
    found_TME = hc_post(y_TE, streams_TME, post_TM, comb_TMM)
    assert_rounded_once(found_TME, exact_post(y_TE, streams_TME, post_TM, comb_TMM))


@pytest.mark.parametrize(("tokens", "width"), [(1, 7168), (3, 64), (40, 4096)])
def test_sinkhorn_of_unbalanced_logits(tokens: int, width: int) -> None:
    """Spread 12: many iterations change something, and eps decides small entries."""
    weights = seam_weights(4, width, spread=12.0)
    norm_weight = normal(width)
    streams_TME = normal(tokens, 4, width).bfloat16()
    _, _, comb_TMM = hc_pre(streams_TME, weights, norm_weight)
    exact = exact_parts(streams_TME, weights)[2]
    # A logit of 50 carries a float32 error of 2e-6 · 50 into its exponential.
    torch.testing.assert_close(comb_TMM.double(), exact, rtol=5e-4, atol=1e-8)
    one = replace(weights, sinkhorn_iters=1)
    torch.testing.assert_close(
        hc_pre(streams_TME, one, norm_weight)[2].double(),
        exact_parts(streams_TME, one)[2],
        rtol=5e-4,
        atol=1e-8,
    )


def test_mixes_of_extreme_streams() -> None:
    """Streams from 1e-3 to 1e4 in size, and a token of zeros."""
    weights = seam_weights(4, 7168)
    norm_weight = normal(7168)
    for tokens in (5, 20):
        size = torch.logspace(-3, 4, tokens, device="cuda")[:, None, None]
        streams_TME = (normal(tokens, 4, 7168) * size).bfloat16()
        assert_pre(hc_pre(streams_TME, weights, norm_weight), streams_TME, weights, norm_weight)
        x_TE, _, _ = hc_pre(torch.zeros_like(streams_TME), weights, norm_weight)
        assert bool((x_TE == 0).all())


@pytest.mark.parametrize("tokens", [1, 8, 9, 200])
def test_tokens_do_not_depend_on_each_other(tokens: int) -> None:
    """A token gives the same bits in every row of a call of the same number of tokens."""
    weights = seam_weights(4, 7168)
    norm_weight = normal(7168)
    incoming = mixing(1, 4)
    y_TE = normal(1, 7168).bfloat16()
    streams_TME = normal(1, 4, 7168).bfloat16()
    given = y_TE.expand(tokens, -1), streams_TME.expand(tokens, -1, -1)
    mixed = incoming[0].expand(tokens, 4), incoming[1].expand(tokens, 4, 4)
    contiguous = [part.contiguous() for part in (*given, *mixed)]
    parts = hc_seam(*contiguous, weights, norm_weight)
    for part in parts:
        assert torch.equal(part, part[:1].expand_as(part))


def test_the_prefill_kernel_agrees_with_the_decode_kernel_on_every_token() -> None:
    weights = seam_weights(4, 4096)
    norm_weight = normal(4096)
    streams_TME = normal(4096, 4, 4096).bfloat16()
    x_TE, post_TM, comb_TMM = hc_pre(streams_TME, weights, norm_weight)
    for start in (0, 17, 2044, 4088):
        few = slice(start, start + 8)
        x_8E, post_8M, comb_8MM = hc_pre(streams_TME[few], weights, norm_weight)
        torch.testing.assert_close(post_TM[few], post_8M, rtol=MIX_BOUND, atol=0)
        torch.testing.assert_close(comb_TMM[few], comb_8MM, rtol=MIX_BOUND, atol=0)
        assert float((x_TE[few] != x_8E).float().mean()) < 1e-3


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_replay_repeats_and_nothing_synchronises(tokens: int) -> None:
    weights = seam_weights(4, 7168)
    norm_weight = normal(7168)
    incoming = mixing(tokens, 4)
    head = HcHeadWeights(
        weights.fn[:4].contiguous(), normal(4), torch.tensor([0.7]).cuda(), EPS, HC_EPS
    )
    y_TE = normal(tokens, 7168).bfloat16()
    streams_TME = normal(tokens, 4, 7168).bfloat16()

    def chain(recording: Recording, y_TE: Tensor, streams_TME: Tensor) -> list[Tensor]:
        module = decode if recording.tokens <= 8 else prefill
        seam = module.hc_seam(recording, y_TE, streams_TME, *incoming, weights, norm_weight)
        found_TME, x_TE, post_TM, comb_TMM = seam
        after_TME = module.hc_post(recording, x_TE, found_TME, post_TM, comb_TMM)
        return [
            found_TME,
            x_TE,
            after_TME,
            *module.hc_pre(recording, after_TME, weights, norm_weight),
            module.hc_head(recording, after_TME, head, norm_weight),
        ]

    prepared = PreparedOp(chain, y_TE, streams_TME)
    first = [part.clone() for part in prepared.run()]
    assert_no_synchronisation(prepared.run)
    for part, again in zip(first, prepared.run(), strict=True):
        assert torch.equal(part, again)
    assert_replay_is_eager(prepared.run)


def test_a_recording_of_a_long_chunk_serves_shorter_ones() -> None:
    """Bit for bit what a recording of just as many tokens gives, whatever the splits."""
    weights = seam_weights(4, 4096)
    norm_weight = normal(4096)
    incoming = mixing(1100, 4)
    y_TE = normal(1100, 4096).bfloat16()
    streams_TME = normal(1100, 4, 4096).bfloat16()
    prepared = PreparedOp(prefill.hc_seam, y_TE, streams_TME, *incoming, weights, norm_weight)
    for tokens in (9, 1100, 17, 300, 16):
        few = [part[:tokens] for part in (y_TE, streams_TME, *incoming)]
        expected = hc_seam(*few, weights, norm_weight)
        for part, exact in zip(prepared.run(tokens), expected, strict=True):
            assert torch.equal(part[:tokens], exact)


@pytest.mark.parametrize("tokens", [1, 9])
def test_inputs_between_guards(tokens: int) -> None:
    """Reads stay inside as well: the bytes around the inputs are not harmless numbers."""
    streams_TME, check_streams = guarded(normal(tokens, 4, 96).bfloat16())
    y_TE, check_y = guarded(normal(tokens, 96).bfloat16())
    weights = seam_weights(4, 96)
    norm_weight = normal(96)
    incoming = mixing(tokens, 4)
    found_TME, *found = hc_seam(y_TE, streams_TME, *incoming, weights, norm_weight)
    assert_pre(tuple(found), found_TME, weights, norm_weight)
    check_streams()
    check_y()


def test_refuses_what_is_elsewhere() -> None:
    """Other dtypes, shapes and layouts: test_hyper_connection_launches.py."""
    streams_TME = normal(2, 4, 64).bfloat16()
    y_TE = normal(2, 64).bfloat16()
    with pytest.raises(ValueError, match="hc_post: found a tensor on cpu, expected cuda"):
        hc_post(y_TE, streams_TME, torch.zeros(2, 4), mixing(2, 4)[1])
