"""Input rows of Flash and Pro that the ranks of one GPU share, and the query rows that gather them:
every product is right, and the same on all ranks, bit for bit.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode, gathered_rows
from dsv4.ops.linear.bench import random_weight
from dsv4.ops.linear.gathered_rows import GatheredRows
from dsv4.ops.linear.row_list import pack_rows
from dsv4.parallel.rank_state import connect
from dsv4.peers import InboxLayout, Peers
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.test_linear_cuda import EPS, assert_product, linear_rows, normal

pytestmark = pytest.mark.gpu

NVFP4 = QuantFormat.NVFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
CUDA = torch.device("cuda", 0)
CSA = (1024, 1024, 256, 256, 64)
HCA = (512, 512)
# K, low rank, format of that and of kv, rows of the compressors and the indexer, query rows.
LAYERS = {
    "Pro CSA": (7168, 1536, FP8, CSA, (8192, 8192)),
    "Pro HCA": (7168, 1536, FP8, HCA, (8192,)),
    "Pro CSA, NVFP4": (7168, 1536, NVFP4, CSA, (8192, 8192)),
    "Flash CSA": (4096, 1024, FP8, CSA, (4096, 8192)),
    "Flash CSA, NVFP4": (4096, 1024, NVFP4, CSA, (4096, 8192)),
}


@pytest.fixture(autouse=True)
def _share_all_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that two ranks would multiply whole."""
    monkeypatch.setattr(gathered_rows, "LEAST_SAVED", 0)


class Layer:
    """Weights that all ranks have, and the steps of each of them."""

    def __init__(self, name: str) -> None:
        self.columns, low_rank, format, others, queries = LAYERS[name]
        formats = [format, format, *[BF16] * len(others)]
        rows = (low_rank, 512, *others)
        self.inputs = [
            random_weight(count, self.columns, one)
            for count, one in zip(rows, formats, strict=True)
        ]
        chosen = [random_weight(count, low_rank, format) for count in queries]
        self.packed_queries = pack_rows(chosen, [None] * len(chosen))
        self.dtypes = [None, None, *[torch.float32] * len(others)]
        self.norm = torch.rand(low_rank, device=CUDA) + 0.5

    def record(self, peers: Peers, x: Tensor) -> tuple[Program, list[Tensor], list[Tensor]]:
        """A rank's two launches, and the memory of the products of both."""
        recording = Recording(Target.of(CUDA), x.shape[0], None, peers)
        inputs = replace(pack_rows(self.inputs, self.dtypes), gathered=True)
        coming, *others = decode.linear_rows(recording, x, inputs)
        assert isinstance(coming, GatheredRows)
        products = decode.linear_rows(recording, coming, self.packed_queries, self.norm, EPS)
        first = coming.rows.products(coming.memory, x.shape[0])[0]
        for tensor in (first, *others, *products):
            recording.keep(tensor)
        program = Program(recording)
        assert len(recording.items) == 2
        found = [program.tensor(one).fill_(torch.nan) for one in (first, *others)]
        return program, found, [program.tensor(one).fill_(torch.nan) for one in products]

    def check(self, x: Tensor, found: list[Tensor], products: list[Tensor]) -> None:
        for product, weight in zip(found, self.inputs, strict=True):
            assert_product(product, x, weight)
        expected = linear_rows(found[0], self.packed_queries, self.norm, EPS)
        for product, alone in zip(products, expected, strict=True):
            assert torch.equal(product, alone)


def run_all(programs: list[Program], tokens: int) -> None:
    """All ranks push before any polls."""
    for item in range(2):
        for program in programs:
            program.run(tokens, item, item + 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_every_rank_has_all_products(name: str, ranks: int) -> None:
    layer = Layer(name)
    for tokens in range(1, 9):
        x = normal(tokens, layer.columns)
        peers = connect(InboxLayout(ranks, layer.columns, 129_280), [CUDA] * ranks, 16)
        steps = [layer.record(one, x) for one in peers]
        for step in (1, 2):
            for one in peers:
                one.step_4[0] = step
            run_all([program for program, *_ in steps], tokens)
            layer.check(x, *steps[0][1:])
            for _, found, products in steps[1:]:
                for product, expected in zip(
                    (*found, *products), (*steps[0][1], *steps[0][2]), strict=True
                ):
                    assert torch.equal(product, expected)
            x.copy_(normal(tokens, layer.columns))
