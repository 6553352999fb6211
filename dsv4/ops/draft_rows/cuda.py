"""The rows of a draft module on the GPU, for 1 to 8 tokens and for more."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.call_types import LinearRows
from dsv4.ops.draft_rows import Block, Place
from dsv4.ops.linear import RowList

_SOURCE = "draft_rows/draft_rows"
_WARP = 32
_THREADS = 128
_PART_BYTES = 16


def begin_rows(
    recording: Recording, place: Place, shift: int, rows_place: Place, block: Block | None = None
) -> None:
    """``dsv4.ops.draft_rows.begin_rows`` with a block of up to 32 tokens."""
    for tensor in (*place, *rows_place):
        expect("place", tensor, torch.int64, (1,))
    count = 0
    if block is not None:
        count = block.tokens_B.shape[0]
        expect("block.token_1", block.token_1, torch.int64, (1,))
        expect("block.tokens_B", block.tokens_B, torch.int64, (count,))
    if count > _WARP:
        raise ValueError(f"block: found {count} tokens, expected at most {_WARP}")
    recording.launch(
        Shape(Kernel(_SOURCE, "begin_rows"), 1, _WARP),
        position=place[0],
        rejected=place[1],
        shift=shift,
        rows_position=rows_place[0],
        rows_rejected=rows_place[1],
        token=None if block is None else block.token_1,
        tokens=None if block is None else block.tokens_B,
        count=count,
        noise=0 if block is None else block.noise,
    )


def token_mixing(recording: Recording, positions_T: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """``dsv4.ops.draft_rows.token_mixing``."""
    tokens = positions_T.shape[0]
    expect("positions_T", positions_T, torch.int64, (tokens,))
    post_TM = recording.empty((tokens, streams), torch.float32)
    comb_TMM = recording.empty((tokens, streams, streams), torch.float32)
    kernel = Kernel(_SOURCE, "token_mixing")
    recording.launch(
        lambda count: Shape(kernel, count, _WARP, settles=True),
        positions=positions_T,
        post=post_TM,
        comb=comb_TMM,
        streams=streams,
    )
    return post_TM, comb_TMM


def shift_streams(
    recording: Recording, streams_TME: Tensor, ring_SME: Tensor, first_1: Tensor
) -> Tensor:
    """``dsv4.ops.draft_rows.shift_streams`` of bfloat16; ``ValueError`` for rows that are no
    multiple of 16 bytes, or do not begin at one.
    """
    tokens = streams_TME.shape[0]
    slots, parts = _check_ring(ring_SME, first_1)
    expect("streams_TME", streams_TME, torch.bfloat16, (tokens, *ring_SME.shape[1:]))
    _check_beginning("streams_TME", streams_TME)
    if tokens >= slots:
        raise ValueError(f"streams_TME: found {tokens} tokens, expected fewer than {slots} slots")
    rows_TME = recording.empty_like(streams_TME)
    kernel = Kernel(_SOURCE, "shift_streams")
    recording.launch(
        lambda count: Shape(kernel, (ceil_div(parts, _THREADS), count), _THREADS),
        streams=streams_TME,
        ring=ring_SME,
        first=first_1,
        rows=rows_TME,
        slots=slots,
        parts=parts,
    )
    return rows_TME


def recall_streams(recording: Recording, ring_SME: Tensor, position_1: Tensor) -> Tensor:
    """``dsv4.ops.draft_rows.recall_streams`` of bfloat16, as ``shift_streams``."""
    slots, parts = _check_ring(ring_SME, position_1)
    row_1ME = recording.empty((1, *ring_SME.shape[1:]), torch.bfloat16)
    recording.launch(
        Shape(Kernel(_SOURCE, "recall_streams"), ceil_div(parts, _THREADS), _THREADS),
        ring=ring_SME,
        position=position_1,
        row=row_1ME,
        slots=slots,
        parts=parts,
    )
    return row_1ME


def stream_linear(
    linear_rows: LinearRows,
    recording: Recording,
    streams_TME: Tensor,
    rows: RowList,
    norm_weight: Tensor,
    norm_eps: float,
) -> Tensor:
    """``dsv4.ops.draft_rows.stream_linear`` by the ``linear_rows`` that writes to the recording.

    Of a decode step as many whole tokens at a time as the product takes rows, else stream by
    stream.
    """
    tokens, streams, width = streams_TME.shape
    result_TMN = recording.empty((tokens, streams, rows.weights[0].shape[0]), streams_TME.dtype)
    norm = (norm_weight, norm_eps)
    together = MAX_DECODE_TOKENS // streams
    if recording.tokens > MAX_DECODE_TOKENS or not together:
        for stream in range(streams):
            x_TE = recording.empty((tokens, width), streams_TME.dtype)
            recording.call(_take_stream(stream), x_TE, streams_TME)
            (product_TN,) = linear_rows(x_TE, rows, *norm)
            recording.call(_put_stream(stream), result_TMN, product_TN)
        return result_TMN
    flat = streams_TME.view(tokens * streams, width)
    if tokens <= together:
        (product,) = linear_rows(flat, rows, *norm)
        return product.view(tokens, streams, -1)
    for first in range(0, tokens, together):
        part = slice(first * streams, (first + together) * streams)
        (product,) = linear_rows(flat[part], rows, *norm)
        recording.call(_copy_whole, result_TMN.flatten(0, 1)[part], product)
    return result_TMN


def _take_stream(stream: int) -> Callable[[int, Tensor, Tensor], None]:
    def take(tokens: int, x_TE: Tensor, streams_TME: Tensor) -> None:
        x_TE[:tokens].copy_(streams_TME[:tokens, stream])

    return take


def _put_stream(stream: int) -> Callable[[int, Tensor, Tensor], None]:
    def put(tokens: int, result_TMN: Tensor, product_TN: Tensor) -> None:
        result_TMN[:tokens, stream].copy_(product_TN[:tokens])

    return put


def _copy_whole(_: int, to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _check_ring(ring_SME: Tensor, position_1: Tensor) -> tuple[int, int]:
    """Slots, and the pieces of 16 bytes of one."""
    expect("ring_SME", ring_SME, torch.bfloat16, tuple(ring_SME.shape))
    expect("position_1", position_1, torch.int64, (1,))
    nbytes = ring_SME[0].numel() * ring_SME.itemsize
    if nbytes % _PART_BYTES:
        found = f"{nbytes} bytes a slot"
        raise ValueError(f"ring_SME: found {found}, expected a multiple of {_PART_BYTES}")
    _check_beginning("ring_SME", ring_SME)
    return ring_SME.shape[0], nbytes // _PART_BYTES


def _check_beginning(name: str, tensor: Tensor) -> None:
    """Raises ``ValueError`` unless the pieces of 16 bytes can be read at once."""
    if not is_aligned(tensor, _PART_BYTES):
        expected = f"one that is a multiple of {_PART_BYTES}"
        raise ValueError(f"{name}: found an address between two pieces, expected {expected}")
