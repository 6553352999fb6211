"""kv_write on the GPU: bytes of pack_kv_rows, ring slots, every format, graphs, bad input."""

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat, pack_kv_rows
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.kv_write import kv_write as torch_kv_write
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope
from tests.ops import forms
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded

pytestmark = pytest.mark.gpu
EPS = 1e-6
FORMATS = [
    (RowFormat.KV_FP8, torch.bfloat16),
    (RowFormat.PLAIN, torch.bfloat16),
    (RowFormat.PLAIN, torch.float32),
]
kv_write = immediately(forms.kv_write)


def inv_freq(rope_width: int) -> Tensor:
    return 160000.0 ** (-torch.arange(0, rope_width, 2, device="cuda") / rope_width)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def ring(
    slots: int, width: int, rope_width: int, format: RowFormat, dtype: torch.dtype
) -> RowCache:
    return RowCache.allocate(slots, width, rope_width, format, dtype, torch.device("cuda"))


@pytest.mark.parametrize(("width", "rope_width"), [(512, 64), (64, 16), (96, 32), (20, 6)])
@pytest.mark.parametrize(("format", "dtype"), FORMATS)
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (131, 8), (1_000_000, 136), (2**31 - 3, 5), (2**40, 2)]
)
def test_equals_the_torch_op(
    width: int, rope_width: int, format: RowFormat, dtype: torch.dtype, start: int, tokens: int
) -> None:
    """Values differ by at most one unit of the stored format, and rarely: the sum of squares has
    another order.
    """
    found, expected = (ring(136, width, rope_width, format, dtype) for _ in range(2))
    for cache in (found, expected):
        cache.data.fill_(3)
    spread = torch.exp2(
        torch.randint(-12, 12, (tokens, 1), generator=torch.Generator().manual_seed(3)).float()
    ).cuda()
    kv_TD = (normal(tokens, width, seed=1) * spread).bfloat16()
    weight = normal(width, seed=2)
    position_T = start + torch.arange(tokens, device="cuda")
    kv_write(kv_TD, weight, position_T, inv_freq(rope_width), found, EPS)
    torch_kv_write(kv_TD, weight, position_T, inv_freq(rope_width), expected, EPS)
    written = position_T % 136
    others = torch.ones(136, dtype=torch.bool, device="cuda")
    others[written] = False
    assert torch.equal(found.data[others], expected.data[others]), (
        "a slot of another position was touched"
    )
    difference = (found.read(written) - expected.read(written)).abs()
    peak = expected.read(written).abs().amax(-1, keepdim=True)
    assert float((difference / peak).max()) <= 2**-3
    assert int((difference > 0).sum()) <= max(1, 2e-3 * difference.numel())
    if found.block_scale is not None:
        assert expected.block_scale is not None
        assert float((found.block_scale != expected.block_scale).float().mean()) < 2e-3


def test_bytes_are_those_of_pack_kv_rows() -> None:
    """Of the same bf16 row, which is what a plain ring gets: tiny, zero, and full-range groups
    included.
    """
    tokens = 300
    width = 512
    kv_TD = normal(tokens, width, seed=4)
    kv_TD[:, :64] *= 1e-6
    kv_TD[1, :] = 0
    kv_TD[:, 128:192] = (
        torch.randint(-448, 449, (tokens, 64), generator=torch.Generator().manual_seed(5)).cuda()
        / 448
    )
    kv_TD = kv_TD.bfloat16()
    cache = ring(tokens, width, 64, RowFormat.KV_FP8, torch.bfloat16)
    plain = ring(tokens, width, 64, RowFormat.PLAIN, torch.bfloat16)
    weight = normal(width, seed=6)
    position_T = torch.arange(tokens, device="cuda")
    for target in (cache, plain):
        kv_write(kv_TD, weight, position_T, inv_freq(64), target, EPS)
    data, block_scale = pack_kv_rows(plain.data.cpu(), 64)
    assert cache.block_scale is not None
    assert torch.equal(cache.data.cpu(), data)
    assert torch.equal(cache.block_scale.cpu(), block_scale)
    row_TD = rope(rms_norm(kv_TD, weight, EPS), position_T, inv_freq(64))
    assert float((plain.data != row_TD).float().mean()) < 1e-3


def test_graph_replay_guards_and_no_synchronisation() -> None:
    cache = ring(136, 512, 64, RowFormat.KV_FP8, torch.bfloat16)
    assert cache.block_scale is not None
    data, check_data = guarded(cache.data)
    scale, check_scale = guarded(cache.block_scale)
    cache = RowCache(data, scale, cache.format, cache.width, cache.rope_width)
    kv_TD = normal(4, 512, seed=1).bfloat16()
    weight = normal(512, seed=2)
    position_T = torch.arange(134, 138).cuda()
    frequencies = inv_freq(64)

    op = PreparedOp(forms.kv_write, kv_TD, weight, position_T, frequencies, cache, EPS)
    assert_replay_is_eager(op.run, (data, scale))
    assert_no_synchronisation(op.run)
    check_data()
    check_scale()


def test_bad_input() -> None:
    cache = ring(136, 512, 64, *FORMATS[0])
    weight = normal(512, seed=2)
    frequencies = inv_freq(64)
    wide = normal(3, 1024, seed=1).bfloat16()
    position_T = torch.arange(3, device="cuda")
    kv_TD = wide[:, :512].contiguous()
    with pytest.raises(ValueError, match="kv_TD: found strides"):
        kv_write(wide[:, :512], weight, position_T, frequencies, cache, EPS)
    with pytest.raises(ValueError, match="kv_TD: found"):
        kv_write(kv_TD.float(), weight, position_T, frequencies, cache, EPS)
    with pytest.raises(ValueError, match="positions_T: found"):
        kv_write(kv_TD, weight, position_T[:2], frequencies, cache, EPS)
    with pytest.raises(ValueError, match="norm_weight: found"):
        kv_write(kv_TD, weight[:7], position_T, frequencies, cache, EPS)
    with pytest.raises(ValueError, match="norm_weight: found"):
        kv_write(kv_TD, weight.bfloat16(), position_T, frequencies, cache, EPS)
    assert not bool(cache.data.any())
