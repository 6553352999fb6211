"""The published vectors through every op that has some, on inputs that the kernels take: bfloat16,
in steps of 1 and of 9 tokens, which are the decode and the prefill forms.

The tests of the rooms hold the torch ops to the same vectors in float32. Here a bound counts the
roundings to bfloat16, each of at most ``UNIT`` relative.
"""

import math

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import Ops, kv_write, rope
from dsv4.ops.compressor import CompressorWeights
from dsv4.ops.compressor import compress as torch_compress
from dsv4.ops.hyper_connection import HcWeights
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.router import Router
from dsv4.weights.codes import pack_e2m1, unpack_e2m1
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops import forms
from tests.ops.cases import EPS, HEAD_DIM, ROPE_DIM, VECTORS, WINDOW, OpsUnderTest, inv_freq
from tests.ops.compressor.cases import empty_state, feed, unit_norm

# The largest relative error of one rounding to bfloat16.
UNIT = 2**-8
# What float32 arithmetic and the digits of the vectors add.
SLACK = 1e-6

both_forms = pytest.mark.parametrize("tokens", [1, 9], ids=["decode", "prefill"])


def for_tokens(row: Tensor, tokens: int) -> Tensor:
    """``row``, in bfloat16, as the input of every token."""
    return row.bfloat16().expand(tokens, *row.shape).contiguous()


def assert_within(found: Tensor, published: Tensor, bound: Tensor) -> None:
    error = (found.float() - published).abs()
    assert bool((error <= bound + SLACK).all()), (found.tolist(), published.tolist())


@both_forms
def test_hyper_connection_split(ops: Ops, tokens: int) -> None:
    """Streams 2 · e_i are exact; the collapse, the root mean square of it and x are rounded."""
    case = VECTORS["hc_split"]
    fn = torch.zeros(24, 16)
    fn[:, 0] = torch.tensor(case["mixes"]) / 2
    scale, base = torch.tensor(case["scale"]), torch.tensor(case["base"])
    weights = HcWeights(fn, base, scale, 0.0, EPS, sinkhorn_iters=20)
    streams_TME = for_tokens(2 * torch.eye(4), tokens)
    x_TE, post_TM, comb_TMM = ops.hc_pre(streams_TME, weights, torch.ones(4))
    pre = torch.tensor(case["pre"])
    assert_within(x_TE * pre.square().mean().sqrt(), pre.expand(tokens, 4), 3 * UNIT * pre)
    for token in range(tokens):
        assert post_TM[token].tolist() == pytest.approx(case["post"], rel=1e-5)
        comb = comb_TMM[token]
        assert comb.flatten().tolist() == pytest.approx(case["comb_row_major"], rel=1e-5)
        assert comb.sum(1).tolist() == pytest.approx(case["row_sums"], abs=2e-6)
        assert comb.sum(0).tolist() == pytest.approx(case["col_sums"], abs=2e-6)


@both_forms
def test_hyper_connection_post(ops: Ops, tokens: int) -> None:
    """The streams are rounded, y is exact, and so is the sum rounded once."""
    split = VECTORS["hc_split"]
    case = VECTORS["hc_post"]
    streams_ME = torch.tensor(case["residual_4x2"]).view(4, 2)
    published = torch.tensor(case["out_4x2"]).view(4, 2)
    post_M, comb_MM = (torch.tensor(split[name]) for name in ("post", "comb_row_major"))
    comb_MM = comb_MM.view(4, 4)
    out_TME = ops.hc_post(
        for_tokens(torch.tensor(case["y"]), tokens),
        for_tokens(streams_ME, tokens),
        post_M.expand(tokens, 4).contiguous(),
        comb_MM.expand(tokens, 4, 4).contiguous(),
    )
    bound = UNIT * (comb_MM.T @ streams_ME.abs() + published.abs())
    assert_within(out_TME, published.expand(tokens, 4, 2), bound)


@both_forms
@pytest.mark.parametrize("op", ["query_rope", "kv_write"])
def test_rotation(backend: str, tokens: int, op: str) -> None:
    """The example at position 5. ``eps`` makes the norm divide by 1, so that it only rotates."""
    case = VECTORS["rope_example"]
    row = torch.zeros(HEAD_DIM)
    row[-ROPE_DIM : 4 - ROPE_DIM] = torch.tensor(case["inp"])
    eps = 1 - float(row.square().mean())
    rotated = rotate(backend, op, for_tokens(row, tokens), inv_freq(4), eps)
    published = torch.tensor(case["out"])
    assert_within(rotated[0, -ROPE_DIM : 4 - ROPE_DIM], published, UNIT * published.abs())


@both_forms
@pytest.mark.parametrize("op", ["query_rope", "kv_write"])
@pytest.mark.parametrize("name", ["inv_freq_swa_theta1e4", "inv_freq_compress_theta16e4_yarn16"])
def test_rotation_by_the_published_tables(backend: str, tokens: int, op: str, name: str) -> None:
    """Pairs (1, 0) show the cosine and the sine of every angle."""
    row = torch.zeros(HEAD_DIM)
    row[-ROPE_DIM::2] = 1
    frequencies = torch.tensor(VECTORS[name])
    eps = 1 - float(row.square().mean())
    rotated = rotate(backend, op, for_tokens(row, tokens), frequencies, eps)
    angle_TR = 5.0 * frequencies + torch.arange(tokens)[:, None] * frequencies
    published = torch.stack((angle_TR.cos(), angle_TR.sin()), dim=-1).flatten(1)
    assert_within(rotated[:, -ROPE_DIM:], published, UNIT * published.abs())


def rotate(backend: str, op: str, rows_TD: Tensor, frequencies: Tensor, eps: float) -> Tensor:
    """Rows normalised and rotated at the positions from 5 on, as queries or as cached keys."""
    position_T = 5 + torch.arange(rows_TD.shape[0])
    if op == "query_rope":
        query_rope = forms.part(backend, rope.query_rope, forms.query_rope)
        return query_rope(rows_TD[:, None], position_T, frequencies, eps)[:, 0]
    ring = key_rows(16, RowFormat.PLAIN)
    write = forms.part(backend, kv_write.kv_write, forms.kv_write)
    write(rows_TD, torch.ones(HEAD_DIM), position_T, frequencies, ring, eps)
    return ring.data[position_T]


def key_rows(slots: int, format: RowFormat) -> RowCache:
    device = torch.get_default_device()
    return RowCache.allocate(slots, HEAD_DIM, ROPE_DIM, format, torch.bfloat16, device)


@both_forms
def test_block_scales_of_key_rows(backend: str, tokens: int) -> None:
    """A group of each row has every published amax; the norm's weight puts it there.

    One that bfloat16 does not have is rounded up, which keeps its exponent.
    """
    write = forms.part(backend, kv_write.kv_write, forms.kv_write)
    published = [(float(amax), two) for amax, two in VECTORS["ue8m0_scale_exponent_fp8"].items()]
    row = torch.zeros(HEAD_DIM)
    row[0 : HEAD_DIM - ROPE_DIM : 64] = 1
    eps = 1 - float(row.square().mean())
    for part in (published[:7], published[-7:]):
        weight = torch.zeros(HEAD_DIM)
        weight[0 : HEAD_DIM - ROPE_DIM : 64] = rounded_up([amax for amax, _ in part])
        ring = key_rows(16, RowFormat.KV_FP8)
        write(for_tokens(row, tokens), weight, torch.arange(tokens), inv_freq(0), ring, eps)
        assert ring.block_scale is not None
        exponents = ring.block_scale[:tokens, :7].int() - 127
        assert exponents.tolist() == [[two for _, two in part]] * tokens


def rounded_up(values: list[float]) -> Tensor:
    """The smallest values of bfloat16 that are not below these, as float32."""
    exact = torch.tensor(values)
    nearest = exact.bfloat16()
    return (nearest.view(torch.int16) + (nearest < exact).short()).view(torch.bfloat16).float()


@pytest.mark.parametrize("tokens", [8, 9], ids=["decode", "prefill"])
def test_overlapping_pool(backend: str, tokens: int) -> None:
    """float32 in and out: the pools of the kernels are as near as those of torch."""
    case = VECTORS["csa_pool_d2"]
    compress = forms.part(backend, torch_compress, forms.compress)
    kv, score = (torch.zeros(tokens, 4) for _ in range(2))
    kv[:8] = torch.tensor(case["kv_8x4"]).view(8, 4)
    score[:8] = torch.tensor(case["score_8x4"]).view(8, 4)
    ape = torch.tensor(case["ape_4x4"]).view(4, 4)
    weights = CompressorWeights(ape, torch.ones(2), torch.ones(1), EPS, 4, False, torch.float32)
    state = empty_state(4, 3, width=2)
    feed(compress, state, (kv, score), 0, tokens, unit_norm(weights, 2))
    published = torch.tensor([case["entry0"], case["entry1"]])
    torch.testing.assert_close(state.rows.data[:2], published, rtol=0, atol=SLACK)


@both_forms
def test_sink(ops: Ops, tokens: int) -> None:
    """A unit value in dimension 4 + key; only the first token counts.

    Three dimensions hold a logit exactly, so weight and result alone are rounded.
    """
    case = VECTORS["sink"]
    ring = key_rows(160, RowFormat.PLAIN)
    rest = torch.tensor(case["logits"]) * math.sqrt(HEAD_DIM)
    for dimension in range(3):
        ring.data[:3, dimension] = rest
        rest = rest - ring.data[:3, dimension]
    ring.data[:3, 4:7] = torch.eye(3)
    query = torch.zeros(1, HEAD_DIM)
    query[0, :3] = 1
    out_THD = ops.sparse_attention(
        for_tokens(query, tokens),
        KeySet(ring, None, 0, WINDOW),
        None,
        torch.tensor([case["sink"]]),
        2 + torch.arange(tokens),
        inv_freq(0),
    )
    published = torch.tensor(case["p"])
    assert_within(out_THD[0, 0, 4:7], published, 2 * UNIT * published)


@both_forms
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_clamped_swiglu(ops: OpsUnderTest, tokens: int, shared: bool) -> None:
    """Every pre-activation is exact; the hidden value and the result are rounded."""
    case = VECTORS["clamped_swiglu"]
    published = torch.tensor(case["h"])
    count = len(published)
    w1, w3, silent = (torch.zeros(64, 64) for _ in range(3))
    w1[:count, 0] = torch.tensor(case["gate"])
    w3[:count, 0] = torch.tensor(case["up"])
    stacks = (w1, torch.eye(64), w3), (silent, silent, silent)
    routed, common = reversed(stacks) if shared else stacks
    experts, shared_expert = (
        ExpertWeights(*(ops.pack_weight(QuantTensor.dense(w.bfloat16())) for w in group))
        for group in ([w[None] for w in routed], common)
    )
    gate = ops.pack_weight(QuantTensor.dense(torch.zeros(1, 64, dtype=torch.bfloat16)))
    token_T = torch.zeros(tokens, dtype=torch.int64)
    router = Router(gate, torch.zeros(1, 1, dtype=torch.int64), True, 1, 1.0)
    x_TE = for_tokens(torch.eye(64)[0], tokens)
    y_TE, _, _ = ops.moe(x_TE, token_T, router, experts, shared_expert, 10.0)
    assert_within(y_TE[:, :count], published.expand(tokens, count), 2 * UNIT * published.abs())


@both_forms
def test_routing_scores(ops: OpsUnderTest, tokens: int) -> None:
    """Expert e multiplies by its score over the sum of all: the logits are exact in bfloat16, the
    hidden value and the result are rounded.
    """
    logits = torch.tensor([float(logit) for logit in VECTORS["sqrtsoftplus"]])
    scores = torch.tensor(list(VECTORS["sqrtsoftplus"].values()))
    count = len(logits)
    gate_XE = torch.zeros(count, 64)
    gate_XE[:, 0] = logits
    w1, w3 = torch.zeros(count, 64, 64), torch.zeros(count, 64, 64)
    # silu(8) · 1 for the one hidden value that the expert puts into its own column.
    w1[torch.arange(count), torch.arange(count), 0] = 8
    w3[torch.arange(count), torch.arange(count), 0] = 1
    stack = w1, torch.eye(64).repeat(count, 1, 1), w3
    parts = (ops.pack_weight(QuantTensor.dense(w.bfloat16())) for w in stack)
    silent = ops.pack_weight(QuantTensor.dense(torch.zeros(64, 64, dtype=torch.bfloat16)))
    gate = ops.pack_weight(QuantTensor.dense(gate_XE.bfloat16()))
    router = Router(gate, torch.zeros(count), False, count, 1.0)
    x_TE = for_tokens(torch.eye(64)[0], tokens)
    token_T = torch.zeros(tokens, dtype=torch.int64)
    shared = ExpertWeights(silent, silent, silent)
    y_TE, _, _ = ops.moe(x_TE, token_T, router, ExpertWeights(*parts), shared, 10.0)
    expected = scores / scores.sum() * 8 / (1 + math.exp(-8))
    assert_within(y_TE[:, :count], expected.expand(tokens, count), 2 * UNIT * expected)


def products(ops: OpsUnderTest, weight: QuantTensor, tokens: int) -> Tensor:
    """``[tokens, N]``: unit vectors read column t of W for token t."""
    x = torch.eye(weight.shape[1], dtype=torch.bfloat16)[:tokens]
    return ops.linear(x, ops.pack_weight(weight))


@pytest.mark.parametrize("tokens", [8, 9], ids=["decode", "prefill"])
def test_four_bit_codes_and_their_scales(ops: OpsUnderTest, tokens: int) -> None:
    """A row of one byte and one scale, and the ties of the rounding at scale 1: all exact."""
    case = VECTORS["mxfp4_unpack"]
    data = torch.full((64, 32), int(case["byte"], 16), dtype=torch.uint8)
    scale = torch.full((64, 2), case["scale_byte"], dtype=torch.uint8)
    stored = QuantTensor(data, scale.view(torch.float8_e8m0fnu), None, QuantFormat.MXFP4, (64, 64))
    y = products(ops, stored, tokens)
    assert y.tolist() == [[case["values"][column % 2]] * 64 for column in range(tokens)]
    ties = VECTORS["e2m1_rne_ties"]
    row = torch.zeros(64)
    row[:8] = torch.tensor([5.5 if tie.startswith(">") else float(tie) for tie in ties])
    row[8] = 6  # the amax of a scale of 1
    y = products(ops, quantize(row.repeat(64, 1), QuantFormat.MXFP4), tokens)
    assert y[:8, 0].tolist() == list(ties.values())


@pytest.mark.parametrize("format", [QuantFormat.MXFP4, QuantFormat.FP8_BLOCK128])
@both_forms
def test_block_scales_of_weights(ops: OpsUnderTest, tokens: int, format: QuantFormat) -> None:
    """The amax comes back as its code times the published power of two."""
    four_bit = format is QuantFormat.MXFP4
    for name, two in VECTORS["ue8m0_scale_exponent_fp4" if four_bit else FP8].items():
        matrix = torch.zeros(128, 128)
        matrix[:, 0] = float(name)
        y = products(ops, quantize(matrix, format), tokens)
        scaled = torch.tensor([float(name)]) * 2.0**-two
        code = unpack_e2m1(pack_e2m1(scaled.repeat(2)))[:1] if four_bit else as_e4m3(scaled)
        assert y[0].float().tolist() == [float(code) * 2.0**two] * 128


FP8 = "ue8m0_scale_exponent_fp8"


def as_e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).float()
