"""What kernels push on a GPU, several ranks on one: the parts of a product, in every inbox."""

from typing import Any

import pytest
import torch

from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig
from dsv4.ops.exchange import decode, sum_ranks
from dsv4.ops.exchange.words import WordSum
from dsv4.ops.immediate import immediately
from dsv4.ops.linear import decode as linear_decode
from dsv4.ops.tables import CUDA_PACKING
from dsv4.parallel.sharding import cut_of
from dsv4.peers import LOGITS_EXCHANGE
from dsv4.weights.cut import COLUMNS, Cut
from dsv4.weights.parameters import parameters
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.cases import normal
from tests.ops.exchange.on_gpu import CUDA, RANKS, begin, bits, ranks_of, run_on
from tests.ranks.cut_weights import cut_weight

pytestmark = pytest.mark.gpu


def packed(weight: QuantTensor, cut: Cut | None) -> Any:
    """A rank's part as the kernels read it."""
    part = cut_weight(weight, cut)
    assert isinstance(part, QuantTensor)
    return CUDA_PACKING.pack_weight(part.to(CUDA))


@pytest.mark.parametrize("format", list(QuantFormat)[:4], ids=lambda format: format.value)
@pytest.mark.parametrize("ranks", [2, 4])
def test_pushed_parts_are_those_of_the_product_in_every_inbox(
    ranks: int, format: QuantFormat
) -> None:
    """Columns of W, 512 of each rank: the product before its rounding."""
    width, columns = 320, 512
    whole = quantize(normal(width, columns * ranks, seed=1, scale=0.05), format)
    cuts = [Cut(COLUMNS, rank * columns, (rank + 1) * columns) for rank in range(ranks)]
    weights = [packed(whole, cut) for cut in cuts]
    for tokens in range(1, 9):
        peers = ranks_of(ranks, width)
        begin(peers, 3)
        x_TK = normal(tokens, columns * ranks, seed=tokens, dtype=torch.bfloat16).to(CUDA)
        inputs = [x_TK[:, cut.first : cut.stop].contiguous() for cut in cuts]
        product = immediately(linear_decode.linear)
        given = [
            product(x, weight, torch.float32) for x, weight in zip(inputs, weights, strict=True)
        ]
        for one in peers:
            one.inbox.fill_(-1)
        for one, x, weight in zip(peers, inputs, weights, strict=True):
            words = run_on(one, tokens, decode.row_parallel_linear, x, weight)
            assert words == WordSum(0, tokens, width)
        expected = sum_ranks(given, torch.bfloat16)
        for one in peers:
            found = run_on(one, tokens, decode.summed, WordSum(0, tokens, width))
            assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("ranks", RANKS)
def test_pushed_logits_are_those_of_every_ranks_rows(ranks: int) -> None:
    """Of 250 rows every rank has some 16s, and the last one what is left."""
    width, vocabulary = 256, 250
    config = ModelConfig.from_dict(tiny_config(vocab_size=vocabulary))
    head = quantize(normal(vocabulary, width, seed=3, scale=0.1), QuantFormat.BF16)
    peers = ranks_of(ranks, vocabulary=vocabulary)
    begin(peers, 2)
    x_TE = normal(5, width, seed=4, dtype=torch.bfloat16).to(CUDA)
    given = []
    for rank, one in enumerate(peers):
        rows = packed(head, cut_of(parameters(config)["head.weight"], ranks, rank))
        given.append(immediately(linear_decode.linear)(x_TE, rows, torch.float32))
        words = run_on(one, 5, decode.vocab_parallel_linear, x_TE, rows)
        assert words == WordSum(LOGITS_EXCHANGE, 5, one.layout.head_rows)
    for one in peers:
        words = WordSum(LOGITS_EXCHANGE, 5, one.layout.head_rows)
        found = run_on(one, 5, decode.gather_logits, words)
        assert torch.equal(bits(found), bits(torch.cat(given, 1)))
