"""Recorded norms: one block per row, for the tokens of a step; what the kernel cannot read is
refused.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.norm.cuda import rms_norm

TARGETS = [
    Target(torch.device("cuda", 0), "sm_90a", 132),
    Target(torch.device("cuda", 0), "sm_100a", 148),
]
EPS = 1e-6


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def recorded(target: Target, tokens: int, *sizes: int) -> Launch:
    recording = Recording(target, tokens)
    x = recording.empty((tokens, *sizes), torch.bfloat16)
    y = rms_norm(recording, x, empty(torch.float32, sizes[-1]), EPS)
    assert y.shape == x.shape
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    return launch


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.architecture)
@pytest.mark.parametrize("width", [1, 7, 64, 96, 1024, 4096, 7168, 24_000])
def test_fewer_tokens_are_fewer_blocks(target: Target, width: int) -> None:
    launch = recorded(target, 2048, width)
    assert launch.shape_of is not None
    for tokens in (1, 9, 10, 100, 129, 511, 512):
        assert launch.shape_of(tokens) == recorded(target, tokens, width).shape
    assert launch.shape.blocks == 2048


def test_rows_of_a_token() -> None:
    launch = recorded(TARGETS[0], 512, 4, 128)
    assert launch.shape_of is not None
    assert launch.shape.blocks == 2048
    shape = launch.shape_of(10)
    assert shape is not None
    assert shape.blocks == 40
    assert shape.kernel.defines == (("COUNT", 8), ("GROUPS", 1))


def test_rows_that_are_no_tokens_of_the_step() -> None:
    """The last token of a chunk: always one row."""
    recording = Recording(TARGETS[0], 512)
    rms_norm(recording, recording.empty((1, 64), torch.bfloat16), None, EPS)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    assert launch.shape_of is None
    assert launch.shape.blocks == 1


def test_rows_on_odd_addresses_are_read_one_column_at_a_time() -> None:
    recording = Recording(TARGETS[0], 3)
    flat = recording.empty((3 * 128 + 1,), torch.bfloat16)
    rms_norm(recording, flat[1:].view(3, 128), None, EPS)
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    assert dict(launch.shape.kernel.defines)["COUNT"] == 1


def test_refuses_what_it_cannot_compute() -> None:
    recording = Recording(TARGETS[0], 2)
    x = recording.empty((2, 64), torch.bfloat16)
    with pytest.raises(ValueError, match=r"^x: found torch\.float32, expected torch\.bfloat16"):
        rms_norm(recording, empty(torch.float32, 2, 64), None, EPS)
    with pytest.raises(ValueError, match=r"^x: found strides \(64, 2\)"):
        rms_norm(recording, x[:, ::2], None, EPS)
    with pytest.raises(
        ValueError, match=r"^weight: found torch\.float32 \[32\], expected .*\[64\]"
    ):
        rms_norm(recording, x, empty(torch.float32, 32), EPS)
    with pytest.raises(ValueError, match=r"^weight: found torch\.bfloat16 \[64\], expected"):
        rms_norm(recording, x, empty(torch.bfloat16, 64), EPS)
    with pytest.raises(ValueError, match="found a tensor on cpu, expected cuda:0"):
        rms_norm(recording, x, torch.ones(64), EPS)
    assert recording.items == []
