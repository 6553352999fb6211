"""Mixture of experts, decode: real and awkward shapes, against float64 on dequantised weights."""

from dataclasses import replace

import pytest
import torch

from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.immediate import PreparedOp
from dsv4.ops.moe import ExpertWeights, decode
from dsv4.ops.moe.decode import Ring
from dsv4.weights.quant import QuantFormat
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.moe.decode_cases import (
    BF16,
    FP8,
    LIMIT,
    MXFP4,
    NVFP4,
    PAIRS,
    check,
    exact,
    listing,
    moe,
    moe_with_routes,
    step,
    weights,
)

pytestmark = pytest.mark.gpu

# Experts are few: what decides is E, F and the routing, and distinct experts come from `X`.
GEOMETRIES = {"pro": (7168, 3072, 16), "flash": (4096, 2048, 24)}
SMALL = {
    "demo": (256, 128, 16),
    "tiny": (128, 64, 8),
    "odd": (192, 96, 9),
    "ragged": (320, 160, 5),
    "narrow": (64, 32, 8),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_real_shapes(geometry: str) -> None:
    width, inner, count = GEOMETRIES[geometry]
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    for tokens in (1, 2, 3, 4, 6, 8):
        arguments = step(width, count, tokens)
        poison()
        found = moe(*arguments, experts, shared, LIMIT)
        check(found, exact(*arguments, experts, shared), f"{geometry} T={tokens}")


@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0].value}+{pair[1].value}")
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_formats(formats: tuple[QuantFormat, QuantFormat], tokens: int) -> None:
    for name in ("demo", "odd", "ragged"):
        width, inner, count = SMALL[name]
        if name == "ragged" and MXFP4 in formats:
            width = 352
            inner = 160
        experts, shared = weights(width, inner, count, formats)
        arguments = step(width, count, tokens)
        poison(1 << 22)
        found = moe(*arguments, experts, shared, LIMIT)
        check(
            found,
            exact(*arguments, experts, shared),
            f"{name} {[f.value for f in formats]} T={tokens}",
        )


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("geometry", SMALL)
def test_small_shapes(geometry: str, tokens: int) -> None:
    width, inner, count = SMALL[geometry]
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    arguments = step(width, count, tokens)
    poison(1 << 22)
    found = moe(*arguments, experts, shared, LIMIT)
    check(found, exact(*arguments, experts, shared), f"{geometry} T={tokens}")


@pytest.mark.parametrize("formats", [(NVFP4, FP8), (MXFP4, FP8), (BF16, BF16)])
def test_loads_decoded_at_once_change_no_bit(
    formats: tuple[QuantFormat, QuantFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an architecture needs fewer of for its registers runs on every other one as well."""
    width, inner, count = GEOMETRIES["flash"]
    experts, shared = weights(width, inner, count, formats)
    choices = sorted(set(decode.LOADS_AT_ONCE.values()))
    for tokens in (1, 4, 8):
        arguments = step(width, count, tokens)
        found = []
        for loads in choices:
            at_once = dict.fromkeys(ARCHITECTURES, loads)
            monkeypatch.setattr(decode, "LOADS_AT_ONCE", at_once)
            poison()
            found.append(moe(*arguments, experts, shared, LIMIT))
        assert torch.equal(found[0], found[1])


def test_both_activation_types_that_do_not_fit_are_split() -> None:
    width = 7168
    inner = 256
    count = 4
    experts, shared = weights(width, inner, count, (NVFP4, BF16))
    arguments = step(width, count, 8)
    check(moe(*arguments, experts, shared, LIMIT), exact(*arguments, experts, shared), "split")


def test_all_tokens_share_experts_and_none_do() -> None:
    width = 512
    inner = 256
    count = 64
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    x_TE, _, router = step(width, count, 8)
    same = torch.tensor([[63, 0, 5, 9, 31, 32]], device="cuda").repeat(8, 1)
    apart = torch.arange(48, device="cuda").flip(0).view(8, 6)
    for note, ids_TP in (("same", same), ("apart", apart)):
        routing = listing(ids_TP, router)
        found = moe(x_TE, *routing, experts, shared, LIMIT)
        check(found, exact(x_TE, *routing, experts, shared), note)


def test_clamps_and_large_values() -> None:
    """Pre-activations far beyond the limit, large routing weights, and a token a million times
    smaller than others.
    """
    width = 512
    inner = 256
    count = 8
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    x_TE, tokens_T, router = step(width, count, 4)
    x_TE = (x_TE * torch.tensor([[300.0], [1.0], [1e-6], [3e4]], device="cuda")).bfloat16()
    router = replace(router, scaling=100.0)
    found = moe(x_TE, tokens_T, router, experts, shared, LIMIT)
    expected = exact(x_TE, tokens_T, router, experts, shared)
    for token in (0, 1, 3):
        check(found[token], expected[token], f"token {token}")
    # h of this token is about 1e-12, below what f16 holds beside the largest h possible: see the
    # docstring of moe.
    assert float((found[2].double() - expected[2]).abs().max()) < 1e-7


def test_an_expert_listed_twice_and_ids_out_of_range() -> None:
    width = 256
    inner = 128
    count = 8
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    x_TE, _, router = step(width, count, 3)
    ids_TP = torch.tensor(
        [[2, 2, 7, 1, 1, 1], [-1, 8, 10**12, 0, 3, -(10**12)], [-1] * 6], device="cuda"
    )
    routing = listing(ids_TP, router)
    poison(1 << 20)
    found = moe(x_TE, *routing, experts, shared, LIMIT)
    check(found, exact(x_TE, *routing, experts, shared), "odd ids")


@pytest.mark.parametrize("formats", [(NVFP4, FP8), (BF16, BF16)])
def test_tokens_do_not_mix(formats: tuple[QuantFormat, QuantFormat]) -> None:
    """Hidden values that are NaN arrive like others, in f16 and in bf16."""
    width = 512
    inner = 256
    count = 8
    experts, shared = weights(width, inner, count, formats)
    for tokens in (3, 8):
        x_TE, tokens_T, router = step(width, count, tokens)
        # The same experts with and without the NaN, also for the token that has it.
        _, ids_TP, _ = moe_with_routes(x_TE, tokens_T, router, experts, shared, LIMIT)
        tokens_T, router = listing(ids_TP, router)
        clean = moe(x_TE, tokens_T, router, experts, shared, LIMIT)
        x_TE[1, 7] = torch.nan
        found = moe(x_TE, tokens_T, router, experts, shared, LIMIT)
        others = [t for t in range(tokens) if t != 1]
        assert bool(found[1].isnan().all())
        assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_replay_is_eager_and_nothing_synchronises(tokens: int) -> None:
    width, inner, count = GEOMETRIES["pro"]
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    arguments = step(width, count, tokens)
    op = PreparedOp(decode.moe, *arguments, experts, shared, LIMIT)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)


@pytest.mark.parametrize("ring", [Ring(8, 4), Ring(4, 4), Ring(12, 3), Ring(16, 1)], ids=str)
def test_other_launch_shapes(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change only the order of the sums."""
    width, inner, count = GEOMETRIES["flash"]
    experts, shared = weights(width, inner, count, (NVFP4, FP8))
    steps = [step(width, count, tokens) for tokens in (1, 4)]
    expected = [exact(*arguments, experts, shared) for arguments in steps]
    monkeypatch.setattr(decode, "RING", ring)
    for arguments, right in zip(steps, expected, strict=True):
        found = moe(*arguments, experts, shared, LIMIT)
        check(found, right, f"{ring} T={len(right)}")


def test_bad_arguments() -> None:
    experts, shared = weights(256, 128, 8, (NVFP4, FP8))
    x_TE, tokens_T, router = step(256, 8, 2)
    with pytest.raises(ValueError, match="x_TE"):
        moe(x_TE.float(), tokens_T, router, experts, shared, LIMIT)
    with pytest.raises(ValueError, match="tokens_T"):
        moe(
            x_TE,
            tokens_T[:1],
            listing(torch.zeros(2, 6, dtype=torch.int64, device="cuda"), router)[1],
            experts,
            shared,
            LIMIT,
        )
    with pytest.raises(ValueError, match="experts: found 8, expected 7"):
        moe(*step(256, 7, 2), experts, shared, LIMIT)
    with pytest.raises(ValueError, match="shared.w2"):
        moe(x_TE, tokens_T, router, experts, ExpertWeights(shared.w1, shared.w1, shared.w3), LIMIT)
