"""Window key rows, executed on the CPU as both forms store them, against the torch op."""

import pytest
import torch

from dsv4.caches.rows import RowCache, RowFormat
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops import kv_write as reference
from tests.ops import forms
from tests.ops.cases import EPS
from tests.ops.executed import execute
from tests.ptx.nvrtc import SourceEdit

SLOTS = 12
JUNK = 0x5A
FORMATS = {
    "fp8": (RowFormat.KV_FP8, torch.bfloat16),
    "bf16": (RowFormat.PLAIN, torch.bfloat16),
    "float32": (RowFormat.PLAIN, torch.float32),
}
FAULTS = {
    "a warp forgets the weight": (
        3,
        SourceEdit("query_rope.cu", "row.normalise(&factors, eps)", "row.normalise(nullptr, eps)"),
    ),
    "a warp forgets the scales": (
        3,
        SourceEdit("head_row.cuh", "[chunk / (KV_GROUP / VECTOR)] = code;", "[0] = code;"),
    ),
    "a block forgets the weight": (
        9,
        SourceEdit("kv_write.cu", " * inverse * norm_weight[d]", " * inverse"),
    ),
    "a block rotates every pair alike": (
        9,
        SourceEdit("kv_write.cu", "inv_freq[first_pair]", "inv_freq[0]"),
    ),
}


def ring(width: int, rope_width: int, format: str) -> RowCache:
    cache = RowCache.allocate(SLOTS, width, rope_width, *FORMATS[format], torch.device("cpu"))
    for part in (cache.data, cache.block_scale):
        if part is not None:
            part.view(torch.uint8).fill_(JUNK)
    return cache


def is_right(
    width: int,
    rope_width: int,
    format: str,
    start: int,
    tokens: int,
    edit: SourceEdit | None = None,
) -> bool:
    """Whether the same slots are written, with values that differ by a rounding and rarely: the sum
    of squares has another order.
    """
    generator = torch.Generator().manual_seed(width + tokens)
    spread = torch.exp2(torch.randint(-12, 12, (tokens, 1), generator=generator))
    kv_TD = (torch.randn(tokens, width, generator=generator) * spread).bfloat16()
    weight = torch.randn(width, generator=generator)
    positions_T = start + torch.arange(tokens)
    inv_freq = 160000.0 ** (-torch.arange(0, rope_width, 2) / rope_width)
    found, expected = (ring(width, rope_width, format) for _ in range(2))
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), tokens)
    forms.kv_write(recording, kv_TD, weight, positions_T, inv_freq, found, EPS)
    execute(recording, tokens, edit)
    reference.kv_write(kv_TD, weight, positions_T, inv_freq, expected, EPS)
    pairs = [(found.data, expected.data)]
    if found.block_scale is not None and expected.block_scale is not None:
        pairs.append((found.block_scale, expected.block_scale))
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[positions_T % SLOTS] = False
    left = all((part.view(torch.uint8)[others] == JUNK).all() for part, _ in pairs)
    rare = all(float((one != two).float().mean()) < 2e-3 for one, two in pairs)
    rows, right = (cache.read(positions_T % SLOTS) for cache in (found, expected))
    near = (rows - right).abs() <= 2**-3 * right.abs().amax(-1, keepdim=True)
    return left and rare and bool(near.all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("width", "rope_width"), [(512, 64), (96, 32), (20, 6)])
def test_equals_the_torch_op(width: int, rope_width: int, format: str) -> None:
    # Position -1 is that of a draft module's row before the first one.
    for start, tokens in ((0, 1), (-1, 3), (2**31 - 4, 9), (-1, 9)):
        assert is_right(width, rope_width, format, start, tokens), (start, tokens)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    tokens, edit = FAULTS[fault]
    assert not is_right(512, 64, "fp8", 5, tokens, edit)
