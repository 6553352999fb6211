"""What both ends of a channel launch."""

import pytest
import torch

from dsv4.channels import Channel
from dsv4.ops.channel.cuda import receive_rows, send_rows, take_tokens
from tests.ops.channel.made import RECEIVER, SENDER
from tests.ops.recorded import functions, launches, meta, numbers

I64 = torch.int64
CHANNEL = Channel(
    SENDER,
    RECEIVER,
    meta(4096, dtype=I64),
    meta(1, dtype=I64),
    meta(1, dtype=I64),
    meta(4, dtype=torch.int32),
)


def test_a_thread_sends_or_receives_a_value_of_32_bits() -> None:
    (sent,) = launches(send_rows, CHANNEL, meta(3, 4, 64), tokens=3)
    assert functions([sent]) == ["send_rows"]
    assert sent.arguments["uses"] is CHANNEL.sent_1
    assert numbers(sent) == {"count": 384}
    (received,) = launches(receive_rows, CHANNEL, meta(3, 4, 64), tokens=3)
    assert received.arguments["uses"] is CHANNEL.received_1
    assert sent.shape.grid == received.shape.grid == (2, 1, 1)
    found = numbers(received)
    assert found == {"count": 384, "width": 32, "pitch": 32, "sender": 0, "receiver": 1}


def test_columns_lie_in_wider_rows() -> None:
    logits_TV = meta(3, 1000, dtype=torch.float32)
    (received,) = launches(receive_rows, CHANNEL, logits_TV[:, 640:], tokens=3)
    found = numbers(received)
    assert (found["count"], found["width"], found["pitch"]) == (1080, 360, 1000)


def test_a_token_is_two_values() -> None:
    tokens_T, given_1 = meta(1, dtype=I64), meta(1, dtype=I64)
    (sent,) = launches(send_rows, CHANNEL, meta(dtype=I64), tokens=1)
    assert numbers(sent) == {"count": 2}
    (taken,) = launches(take_tokens, CHANNEL, tokens_T, given_1, tokens=1)
    assert taken.arguments["given"] is given_1
    assert numbers(taken) == {"count": 1, "sender": 0, "receiver": 1}
    assert taken.shape.settles


def test_rows_that_are_no_whole_values_go_by_halves() -> None:
    for op in (send_rows, receive_rows):
        for tokens, halves in ((1, True), (2, False), (3, True)):
            (launch,) = launches(op, CHANNEL, meta(tokens, 33), tokens=tokens)
            assert ("HALVES" in dict(launch.shape.kernel.defines)) is halves
            assert launch.arguments["count"] == 33 * tokens // (1 if halves else 2)


def test_other_rows_are_refused() -> None:
    for op in (send_rows, receive_rows):
        with pytest.raises(ValueError, match="rows: found 16400 bytes, expected .* 2 up to 16384"):
            launches(op, CHANNEL, meta(1, 8200), tokens=1)
        with pytest.raises(ValueError, match="rows: found 3 bytes, expected a multiple of 2"):
            launches(op, CHANNEL, meta(1, 3, dtype=torch.uint8), tokens=1)
        with pytest.raises(ValueError, match="rows: found 8194 bytes, expected .* 2 up to 8192"):
            launches(op, CHANNEL, meta(1, 4097), tokens=1)
        with pytest.raises(ValueError, match=r"rows: found strides \(1, 2\)"):
            launches(op, CHANNEL, meta(8, 2).T, tokens=2)
        with pytest.raises(ValueError, match="rows: found an address between multiples of 4"):
            launches(op, CHANNEL, meta(9)[1:], tokens=1)
    with pytest.raises(ValueError, match="rows: found strides"):
        launches(send_rows, CHANNEL, meta(2, 64)[:, :32], tokens=2)
    for columns, found in ((meta(2, 8)[:, 2:5], "6 bytes every 16"), (meta(2, 9), "8 bytes every")):
        with pytest.raises(ValueError, match=f"rows: found {found}"):
            launches(receive_rows, CHANNEL, columns[:, :4], tokens=2)
    with pytest.raises(ValueError, match=r"given_1: found torch\.int32"):
        launches(take_tokens, CHANNEL, meta(1, dtype=I64), meta(1, dtype=torch.int32), tokens=1)
