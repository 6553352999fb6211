"""Query rows of Flash and Pro, whole and as a rank of 8 has them: both products on a GPU, and that
a dense step gives the first one the same bits and leaves the other alone.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode
from dsv4.ops.linear.bench import random_weight
from dsv4.ops.linear.row_list import PackedRows, pack_rows
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.test_linear_cuda import FORMATS, assert_product, normal

pytestmark = pytest.mark.gpu

INDEX_ROWS = 8192


def products(x: Tensor, listed: PackedRows, dense: bool) -> list[Tensor]:
    """Into memory that holds NaN before."""
    recording = Recording(Target.of(x.device), x.shape[0])
    recorded = [recording.keep(product) for product in decode.linear_rows(recording, x, listed)]
    selected = recording.empty((1,), torch.int64)
    recording.choose(selected, 1)
    assert recording.leave_choice_out(selected)
    program = Program(recording)
    found = [program.tensor(product).fill_(torch.nan) for product in recorded]
    program.run(x.shape[0], dense=dense)
    return found


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(("rows", "columns"), [(32768, 1024), (65536, 1536), (8192, 1536)])
def test_query_rows(format: QuantFormat, rows: int, columns: int) -> None:
    weights = [random_weight(count, columns, format) for count in (rows, INDEX_ROWS)]
    listed = replace(pack_rows(weights, [None, None]), for_choice=1)
    for tokens in range(1, 9):
        x = normal(tokens, columns)
        queries, index_queries = products(x, listed, dense=False)
        assert_product(queries, x, weights[0])
        assert_product(index_queries, x, weights[1])
        dense_queries, left_alone = products(x, listed, dense=True)
        assert torch.equal(dense_queries, queries)
        assert left_alone.isnan().all()
