"""Products of long steps by TMA on the GPU: float32 sums of the packed weight for published and
other shapes, and the bits of the form of shorter steps where that does not share K.
"""

import pytest
import torch

from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.linear import prefill, prefill_long
from dsv4.weights.packed import pack_weight
from dsv4.weights.quantize import quantize
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison
from tests.ops.linear.test_prefill_linear import FORMATS, QuantFormat, assert_product, normal

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(129, 64, 64), (257, 1536, 1024), (700, 4096, 2048), (1000, 448, 96), (2048, 8192, 1024)],
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_linear(
    format: QuantFormat, tokens: int, rows: int, columns: int, out_dtype: torch.dtype
) -> None:
    weight = quantize(normal(rows, columns, seed=1, scale=0.1), format)
    x = normal(tokens, columns, seed=2, dtype=torch.bfloat16)
    packed = pack_weight(weight)
    poison(1 << 20)
    y = immediately(prefill_long.linear)(x, packed, out_dtype)
    assert_product(y, x.double() @ weight.dequantize().double().T)
    if rows * tokens > 1 << 23:
        assert torch.equal(y, immediately(prefill.linear)(x, packed, out_dtype))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "columns"), [(300, 8, 1024, 4096), (130, 2, 128, 64)]
)
def test_grouped_linear(
    format: QuantFormat, tokens: int, groups: int, rows: int, columns: int
) -> None:
    weight = quantize(normal(groups * rows, columns, seed=5, scale=0.1), format)
    x_GTK = normal(groups, tokens, columns, seed=6, dtype=torch.bfloat16)
    poison(1 << 20)
    y = immediately(prefill_long.grouped_linear)(x_GTK.transpose(0, 1), pack_weight(weight))
    dense = weight.dequantize().double().unflatten(0, (groups, rows))
    assert_product(y, torch.einsum("gtk,grk->tgr", x_GTK.double(), dense))


def test_rows_behind_the_tokens_do_not_matter() -> None:
    """TMA copies those of a shorter step too, whatever they hold."""
    weight = pack_weight(quantize(normal(512, 256, seed=7, scale=0.1), QuantFormat.NVFP4))
    x = normal(600, 256, seed=8, dtype=torch.bfloat16)
    op = PreparedOp(prefill_long.linear, x, weight)
    for tokens in (600, 390, 129):
        expected = immediately(prefill_long.linear)(x[:tokens].clone(), weight)
        x[tokens:] = torch.nan
        assert torch.equal(op.run(tokens)[:tokens], expected)


def test_a_graph_replays_it() -> None:
    weight = pack_weight(quantize(normal(4096, 1024, seed=9, scale=0.1), QuantFormat.FP8_BLOCK128))
    x = normal(512, 1024, seed=10, dtype=torch.bfloat16)
    op = PreparedOp(prefill_long.linear, x, weight)
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)
