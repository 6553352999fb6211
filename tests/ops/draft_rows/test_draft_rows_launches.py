"""What the launchers of a draft module's rows record."""

from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Call
from dsv4.launch.recording import Recording
from dsv4.ops.draft_rows import Block
from dsv4.ops.draft_rows.cuda import (
    begin_rows,
    recall_streams,
    shift_streams,
    stream_linear,
    token_mixing,
)
from dsv4.ops.tables import CUDA_TABLE
from dsv4.weights.quant import QuantFormat, planned_quant_tensor
from tests.ops.recorded import (
    HOPPER,
    assert_serves_shorter_chunks,
    launches,
    meta,
    numbers,
)

I64 = torch.int64
ONE = meta(1, dtype=I64)
PLACE = (ONE, ONE)
RING = meta(20, 4, 256)


def test_rows_begin_with_one_launch() -> None:
    (launch,) = launches(begin_rows, PLACE, -3, PLACE, tokens=1)
    assert numbers(launch) == {"shift": -3, "count": 0, "noise": 0}
    block = Block(meta(5, dtype=I64), ONE, 128799)
    (launch,) = launches(begin_rows, PLACE, 0, PLACE, block, tokens=5)
    assert numbers(launch) == {"shift": 0, "count": 5, "noise": 128799}
    with pytest.raises(ValueError, match="block: found 33 tokens, expected at most 32"):
        launches(begin_rows, PLACE, 0, PLACE, Block(meta(33, dtype=I64), ONE, 1), tokens=33)


def test_streams_move_by_one_launch() -> None:
    (launch,) = launches(shift_streams, meta(6, 4, 256), RING, ONE, tokens=6)
    assert (launch.shape.grid, launch.shape.threads) == ((1, 6, 1), 128)
    assert numbers(launch) == {"slots": 20, "parts": 128}
    (launch,) = launches(recall_streams, RING, ONE, tokens=1)
    assert launch.shape.grid == (1, 1, 1)


def test_other_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="found 20 tokens, expected fewer than 20 slots"):
        launches(shift_streams, meta(20, 4, 256), RING, ONE, tokens=20)
    with pytest.raises(ValueError, match="ring_SME: found 2 bytes a slot, expected a multiple"):
        launches(recall_streams, meta(20, 1, 1), ONE, tokens=1)


def test_streams_that_no_load_of_16_bytes_reaches_are_refused() -> None:
    shifted = meta(6 * 4 * 256 + 1)[1:].view(6, 4, 256)
    with pytest.raises(ValueError, match="streams_TME: found an address between two pieces"):
        launches(shift_streams, shifted, RING, ONE, tokens=6)
    ring = meta(20 * 4 * 256 + 1)[1:].view(20, 4, 256)
    with pytest.raises(ValueError, match="ring_SME: found an address between two pieces"):
        launches(recall_streams, ring, ONE, tokens=1)


def test_mixing_serves_shorter_chunks() -> None:
    assert_serves_shorter_chunks(
        lambda tokens: launches(token_mixing, meta(tokens, dtype=I64), 4, tokens=tokens), 139
    )


def stream_product(tokens: int) -> tuple[list[str], tuple[int, ...]]:
    recording = Recording(HOPPER, tokens)
    ops = CUDA_TABLE.on(recording)
    weight = planned_quant_tensor(QuantFormat.FP8_BLOCK128, (256, 256))
    rows = CUDA_TABLE.packing.pack_rows([weight], [None])
    norm = meta(256, dtype=torch.float32)
    multiply = partial(stream_linear, ops.linear_rows, recording)
    result: Tensor = multiply(meta(tokens, 4, 256), rows, norm, 1e-6)
    names = [
        "call" if isinstance(item, Call) else item.shape.kernel.function for item in recording.items
    ]
    return names, tuple(result.shape)


def test_two_tokens_of_four_streams_are_multiplied_at_once() -> None:
    for tokens in (1, 2):
        assert stream_product(tokens) == (["decode_linear"], (tokens, 4, 256))
    assert stream_product(5) == (["decode_linear", "call"] * 3, (5, 4, 256))


def test_a_prompt_is_multiplied_stream_by_stream() -> None:
    names, shape = stream_product(139)
    assert shape == (139, 4, 256)
    assert names.count("prefill_linear") == 4
