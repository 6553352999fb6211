"""The exchange on a GPU, several ranks on one: words that the test writes, against sums in torch.
Bit for bit.
"""

import math
import time

import pytest
import torch

from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig
from dsv4.ops.exchange import decode, prefill, sum_ranks
from dsv4.ops.exchange.prefill import PartialSum
from dsv4.ops.exchange.words import WordSum
from dsv4.ops.hyper_connection import decode as hc_decode
from dsv4.ops.immediate import immediately
from dsv4.parallel.sharding import cut_of
from dsv4.peers import LOGITS_EXCHANGE, STEP_NUMBERS
from dsv4.weights.parameters import parameters
from tests.ops.cases import normal
from tests.ops.exchange.on_gpu import (
    CUDA,
    MOST,
    RANKS,
    SPECIAL,
    WIDTH,
    begin,
    bits,
    parts,
    prepared,
    ranks_of,
    run_on,
    same,
    words_at,
    write,
)
from tests.ops.hyper_connection.exact import mixing, seam_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", [1, 77, STEP_NUMBERS - 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_words_are_added_in_the_order_of_the_ranks_and_rounded_once(ranks: int, step: int) -> None:
    for tokens in (1, 3, 8):
        for exchange in (0, 1, 121):
            peers = ranks_of(ranks)
            begin(peers, step)
            words = WordSum(exchange, tokens, WIDTH)
            given = parts(ranks, tokens, WIDTH)
            expected = sum_ranks(given, torch.bfloat16)
            found = []
            for one in peers:
                # The tag of the last step's logits, which no sum has.
                one.inbox.fill_(-1)
                for rank, values in enumerate(given):
                    write(one, words, rank, values, step)
                found.append(run_on(one, tokens, decode.summed, words))
            assert all(same(sums, expected) for sums in found)
            assert all(torch.equal(bits(sums), bits(found[0])) for sums in found)


@pytest.mark.parametrize("vocabulary", [250, 16 * 8, 1000])
@pytest.mark.parametrize("ranks", RANKS)
def test_logits_of_uneven_ranks_come_in_the_order_of_the_vocabulary(
    ranks: int, vocabulary: int
) -> None:
    head = parameters(ModelConfig.from_dict(tiny_config(vocab_size=vocabulary)))["head.weight"]
    for tokens in (1, 8):
        (one, *_) = ranks_of(ranks, vocabulary=vocabulary)
        one.inbox.fill_(0x0000_0103_7FC0_0000)
        begin([one], 9)
        words = WordSum(LOGITS_EXCHANGE, tokens, one.layout.head_rows)
        whole = normal(tokens, vocabulary, seed=1).to(CUDA)
        whole[:, : len(SPECIAL)] = torch.tensor(SPECIAL, device=CUDA)
        for rank in range(ranks):
            cut = cut_of(head, ranks, rank)
            assert cut is not None
            write(one, words, rank, whole[:, cut.first : cut.stop], 9)
        found = run_on(one, tokens, decode.gather_logits, words)
        assert torch.equal(bits(found), bits(whole))


@pytest.mark.parametrize(
    ("step", "exchange"), [(4, 0), (6, 0), (5, 2), (0, 0)], ids=["old", "new", "other", "never"]
)
def test_words_that_belong_elsewhere_are_waited_out(step: int, exchange: int) -> None:
    """All but one word are right; the last one comes when the kernel already looks for it."""
    (one, *_) = ranks_of(2)
    begin([one], 5)
    words = WordSum(0, 1, WIDTH)
    given = parts(2, 1, WIDTH)
    for rank, values in enumerate(given):
        write(one, words, rank, values, 5)
    last = words_at(one, words, 1)[WIDTH - 1 : WIDTH]
    right = last.clone()
    last.fill_((step * 256 + exchange) << 32 | 0x3F800000)
    run, found = prepared(one, 1, decode.summed, words)
    torch.cuda.synchronize()
    waiting, writing = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)
    done = torch.cuda.Event()
    with torch.cuda.stream(waiting):
        run(1)
        done.record(waiting)
    time.sleep(0.2)
    assert not done.query()
    with torch.cuda.stream(writing):
        last.copy_(right)
    torch.cuda.synchronize()
    assert same(found, sum_ranks(given, torch.bfloat16))


@pytest.mark.parametrize("width", [4096, 7168, 256])
def test_a_seam_of_words_is_that_of_their_sum(width: int) -> None:
    for ranks in (2, 8):
        (one, *_) = ranks_of(ranks, width)
        begin([one], 6)
        for tokens in (1, 5, 8):
            given = [normal(tokens, width, seed=rank).to(CUDA) for rank in range(ranks)]
            words = WordSum(0, tokens, width)
            for rank, values in enumerate(given):
                write(one, words, rank, values, 6)
            y_TE = sum_ranks(given, torch.bfloat16)
            streams = normal(tokens, 4, width, seed=20, dtype=torch.bfloat16).to(CUDA)
            residual = streams, *mixing(tokens, 4)
            weights = seam_weights(4, width), normal(width, seed=22).to(CUDA)
            found = run_on(one, tokens, hc_decode.hc_seam, words, *residual, *weights)
            expected = immediately(hc_decode.hc_seam)(y_TE, *residual, *weights)
            for mine, other in zip(found, expected, strict=True):
                assert torch.equal(mine, other)
            mixed = run_on(one, tokens, hc_decode.hc_post, words, *residual)
            assert torch.equal(mixed, immediately(hc_decode.hc_post)(y_TE, *residual))


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_parts_in_the_memory_of_all_ranks_are_added_in_their_order(ranks: int, slot: int) -> None:
    """Rows of a shorter chunk alone."""
    peers = ranks_of(ranks)
    given = parts(ranks, MOST, WIDTH)
    expected = sum_ranks(given, torch.bfloat16)
    for one, values in zip(peers, given, strict=True):
        one.partials_STE.fill_(math.nan)
        one.partials_STE[slot].copy_(values)
    for one in peers:
        run, sums = prepared(one, MOST, prefill.summed, PartialSum(4 + slot, given[0]))
        for tokens in (MOST, 9):
            sums.fill_(7.0)
            run(tokens)
            assert same(sums[:tokens], expected[:tokens])
            assert bool((sums[tokens:] == 7).all())


def test_a_step_of_logits_alone_has_the_next_number() -> None:
    (one, *_) = ranks_of(2)
    run, _ = prepared(one, 1, decode.next_step)
    for number in (1, 2, 3):
        run(1)
        assert one.step_4.tolist() == [number, 0, 0, 0]
