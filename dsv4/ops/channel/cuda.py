"""Channels on GPUs: the kernels at both ends (``channel.cu``)."""

import torch
from torch import Tensor

from dsv4.channels import HALF_BYTES, Channel, value_bytes
from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect, expect_rows
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording

_SOURCE = "channel/channel"
_THREADS = 256


def send_rows(recording: Recording, channel: Channel, rows: Tensor) -> None:
    """Rows without gaps, of a multiple of 2 bytes, into ``channel``, on its source.

    Raises ``ValueError`` for other rows, and for more than the channel has room for.
    """
    expect("rows", rows, rows.dtype, tuple(rows.shape))
    count = _values(channel, rows)
    recording.reach(channel.words_W)
    recording.launch(
        Shape(_kernel("send_rows", rows), ceil_div(count, _THREADS), _THREADS),
        rows=rows,
        words=channel.words_W,
        uses=channel.sent_1,
        count=count,
    )


def receive_rows(recording: Recording, channel: Channel, rows: Tensor, early: bool = False) -> None:
    """What was sent into ``channel``, on its target. ``rows`` may be columns of wider ones.
    ``early``: it comes soon, so that the next kernel may start in front of it.

    Raises ``ValueError`` as ``send_rows``, for gaps inside a row, and for columns that are no whole
    values in each row.
    """
    count = _values(channel, rows)
    width, pitch = _steps(rows, count)
    kernel = _kernel("receive_rows", rows, early)
    recording.launch(
        Shape(kernel, ceil_div(count, _THREADS), _THREADS, settles=not early),
        **_received(channel),
        rows=rows,
        count=count,
        width=width,
        pitch=pitch,
    )


def take_tokens(recording: Recording, channel: Channel, tokens_T: Tensor, given_1: Tensor) -> None:
    """The tokens that were sent into ``channel`` where the host has given none: ``given_1`` int64
    ``[1]`` is 0 then, and 0 behind it.
    """
    tokens = tokens_T.numel()
    expect("tokens_T", tokens_T, torch.int64, (tokens,))
    expect("given_1", given_1, torch.int64, (1,))
    _values(channel, tokens_T)
    recording.launch(
        Shape(_kernel("take_tokens", tokens_T), 1, 32, settles=True),
        **_received(channel),
        given=given_1,
        tokens=tokens_T,
        count=tokens,
    )


def _kernel(function: str, rows: Tensor, early: bool = False) -> Kernel:
    halves = (("HALVES", 1),) if _unit(rows) == HALF_BYTES else ()
    return Kernel(_SOURCE, function, (("EARLY", int(early)), *halves))


def _received(channel: Channel) -> dict[str, Tensor | int]:
    return {
        "words": channel.words_W,
        "uses": channel.received_1,
        "fault": channel.fault_4,
        "sender": channel.source.index or 0,
        "receiver": channel.target.index or 0,
    }


def _unit(rows: Tensor) -> int:
    """Bytes of a value. Both ends go by the bytes of all rows, which both of them know."""
    return value_bytes(rows.numel() * rows.itemsize)


def _steps(rows: Tensor, count: int) -> tuple[int, int]:
    """Values in a row, and from its start to the next one's."""
    unit = _unit(rows)
    width = rows.itemsize * rows.shape[-1]
    pitch = width
    if rows.dim() == 2:
        expect_rows("rows", rows, rows.dtype, tuple(rows.shape))
        pitch = rows.itemsize * rows.stride(0)
    else:
        expect("rows", rows, rows.dtype, tuple(rows.shape))
    if width % unit == 0 and pitch % unit == 0:
        return width // unit, pitch // unit
    if rows.is_contiguous():
        # They follow each other: values may belong to two of them.
        return count, count
    raise ValueError(f"rows: found {width} bytes every {pitch}, expected multiples of {unit}")


def _values(channel: Channel, rows: Tensor) -> int:
    """How many, in rows that fit."""
    unit = _unit(rows)
    if not is_aligned(rows, unit):
        expected = f"multiples of {unit}"
        raise ValueError(f"rows: found an address between {expected}, expected one of them")
    nbytes = rows.numel() * rows.itemsize
    room = channel.words_W.shape[0]
    if nbytes % unit or nbytes // unit > room:
        raise ValueError(
            f"rows: found {nbytes} bytes, expected a multiple of {HALF_BYTES} up to {room * unit}"
        )
    return nbytes // unit
