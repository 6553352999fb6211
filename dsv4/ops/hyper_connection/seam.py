"""What decode and prefill share of a seam: its checks and its two launches.

A mixing kernel writes the streams and partial sums of fn · x and Σ x²; ``hc_finish`` the rest.

Rounding is that of ``dsv4.ops.hyper_connection``: streams, collapsed stream and normalised stream
to bfloat16, all else float32. Sinkhorn iterations stop once one changes no row or column sum by
more than 2.5e-7.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.checks import expect
from dsv4.launch.kernel import Defines, Kernel, Shape, ceil_div, round_up
from dsv4.launch.recording import Recording, ShapeOf, is_aligned
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights

# Every lane of Sinkhorn's warp keeps the matrix in registers, 64 of them for 8 streams.
MAX_STREAMS = 8
_WARP = 32


class Incoming(NamedTuple):
    """What ``hc_post`` adds to the streams: y ``[T, E]``, post ``[T, M]``, comb ``[T, M, M]``."""

    y: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class Seam:
    """The arguments of ``hc_pre``, ``hc_seam`` and ``hc_head``, checked.

    ``incoming``: of ``hc_seam`` alone; the other two read the streams as they are. ``mix_aligned``
    and ``finish_aligned``: whether all that the two kernels read begins at multiples of 16 bytes.
    """

    streams_TME: Tensor
    incoming: Incoming | None
    weights: HcWeights | HcHeadWeights
    norm_weight: Tensor
    mix_aligned: bool
    finish_aligned: bool

    @property
    def streams(self) -> int:
        """M."""
        return self.streams_TME.shape[1]

    @property
    def width(self) -> int:
        """E."""
        return self.streams_TME.shape[2]

    @property
    def mixes(self) -> int:
        """Rows of fn."""
        return self.weights.fn.shape[0]

    @property
    def defines(self) -> Defines:
        """What every kernel of a seam is compiled with."""
        return ("STREAMS", self.streams), ("MIXES", self.mixes)

    def mix_columns(self, most: int) -> int:
        """Columns of one memory access of the mixing kernel, at most ``most``."""
        return _columns(most, self.width, self.mix_aligned)

    def finish_columns(self) -> int:
        """Columns of one memory access of ``hc_finish``."""
        return _columns(8, self.width, self.finish_aligned)


class SeamShapes(NamedTuple):
    """How a seam's kernels are launched.

    ``partial_rows``: of MIXES + 1 partial sums each: the most tokens × splits of any step.
    """

    mix: Shape | ShapeOf
    finish: Shape | ShapeOf
    partial_rows: int


def checked_seam(
    streams_TME: Tensor,
    incoming: Incoming | None,
    weights: HcWeights | HcHeadWeights,
    norm_weight: Tensor,
) -> Seam:
    """Raises ``ValueError`` for a dtype, shape or layout that the kernels do not take."""
    check_streams(streams_TME)
    _, streams, width = streams_TME.shape
    if isinstance(weights, HcWeights):
        mixes = (2 + streams) * streams
        scales = 3
    else:
        mixes = streams
        scales = 1
    expect("fn", weights.fn, torch.float32, (mixes, streams * width))
    expect("base", weights.base, torch.float32, (mixes,))
    expect("scale", weights.scale, torch.float32, (scales,))
    expect("norm_weight", norm_weight, torch.float32, (width,))
    mix_aligned = is_aligned(streams_TME) and is_aligned(weights.fn)
    finish_aligned = is_aligned(norm_weight)
    if incoming is not None:
        check_incoming(incoming, streams_TME)
        # The streams that hc_finish reads are a buffer of the recording, which is aligned.
        mix_aligned = mix_aligned and is_aligned(incoming.y)
    else:
        finish_aligned = finish_aligned and is_aligned(streams_TME)
    return Seam(streams_TME, incoming, weights, norm_weight, mix_aligned, finish_aligned)


def check_streams(streams_TME: Tensor) -> None:
    """Raises ``ValueError`` unless these are contiguous bfloat16 streams, 1 to 8 of them."""
    if streams_TME.dtype != torch.bfloat16:
        raise ValueError(f"streams_TME: found {streams_TME.dtype}, expected torch.bfloat16")
    if streams_TME.dim() != 3 or not 1 <= streams_TME.shape[1] <= MAX_STREAMS:
        found = list(streams_TME.shape)
        raise ValueError(f"streams_TME: found {found}, expected [T, 1 to {MAX_STREAMS}, E]")
    expect("streams_TME", streams_TME, torch.bfloat16, tuple(streams_TME.shape))


def check_incoming(incoming: Incoming, streams_TME: Tensor) -> None:
    """Raises ``ValueError`` unless the parts are contiguous and fit these streams."""
    tokens, streams, width = streams_TME.shape
    expect("y_TE", incoming.y, torch.bfloat16, (tokens, width))
    expect("post_TM", incoming.post, torch.float32, (tokens, streams))
    expect("comb_TMM", incoming.comb, torch.float32, (tokens, streams, streams))


def _columns(most: int, width: int, aligned: bool) -> int:
    """Columns of one access: ``most`` where the width and all addresses allow it, else 1."""
    return most if aligned and width % most == 0 else 1


def finish_shape(seam: Seam, tokens: int, splits: int, blocks: int, most_workers: int) -> Shape:
    """``hc_finish`` by ``blocks`` blocks for each token, of at most ``most_workers`` threads.

    Another warp of the first block computes post and comb beside them.
    """
    count = seam.finish_columns()
    accesses = ceil_div(seam.width, count)
    groups = ceil_div(accesses, blocks * most_workers)
    workers = round_up(ceil_div(accesses, blocks * groups), _WARP)
    defines = (
        *seam.defines,
        ("SPLITS", splits),
        ("COUNT", count),
        ("GROUPS", groups),
        ("WORKERS", workers),
        ("BLOCKS", blocks),
    )
    kernel = Kernel("hyper_connection/hyper_connection_finish", "hc_finish", defines)
    return Shape(kernel, (blocks, tokens), workers + _WARP, cluster=blocks)


def mix_shape(seam: Seam, multiprocessors: int, tokens: int, block_tokens: int) -> Shape:
    """``hc_mix``: ``mix_splits`` blocks share the columns of ``block_tokens`` tokens."""
    per_lane, splits = _mix_plan(seam, multiprocessors)
    defines = (
        *seam.defines,
        ("POST", int(seam.incoming is not None)),
        ("COUNT", seam.mix_columns(4)),
        ("PER_LANE", per_lane),
        ("TOKENS", block_tokens),
    )
    kernel = Kernel("hyper_connection/hyper_connection", "hc_mix", defines)
    grid = splits, ceil_div(tokens, block_tokens)
    return Shape(kernel, grid, 8 * _WARP, numbers={"tokens": tokens})


def mix_splits(seam: Seam, multiprocessors: int) -> int:
    """Splits of the columns by ``hc_mix``."""
    return _mix_plan(seam, multiprocessors)[1]


def _mix_plan(seam: Seam, multiprocessors: int) -> tuple[int, int]:
    """(accesses per lane, blocks): no more blocks than multiprocessors, if two accesses suffice."""
    accesses = ceil_div(seam.width, seam.mix_columns(4))
    one, two = (ceil_div(accesses, per_lane * _WARP // seam.streams) for per_lane in (1, 2))
    return (1, one) if one <= multiprocessors else (2, two)


def record_pre(
    recording: Recording, seam: Seam, shapes: SeamShapes
) -> tuple[Tensor, Tensor, Tensor]:
    """x, post and comb of the streams as they are."""
    tokens, streams, width = seam.streams_TME.shape
    x_TE = recording.empty((tokens, width), torch.bfloat16)
    post_TM = recording.empty((tokens, streams), torch.float32)
    comb_TMM = recording.empty((tokens, streams, streams), torch.float32)
    _record(recording, seam, shapes, _Outgoing(None, x_TE, post_TM, comb_TMM))
    return x_TE, post_TM, comb_TMM


def record_seam(
    recording: Recording, seam: Seam, shapes: SeamShapes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The streams after ``hc_post``, in memory of their own, and their x, post and comb."""
    assert seam.incoming is not None
    streams_TME = recording.empty_like(seam.streams_TME)
    x_TE = recording.empty_like(seam.incoming.y)
    post_TM = recording.empty_like(seam.incoming.post)
    comb_TMM = recording.empty_like(seam.incoming.comb)
    _record(recording, seam, shapes, _Outgoing(streams_TME, x_TE, post_TM, comb_TMM))
    return streams_TME, x_TE, post_TM, comb_TMM


def record_head(recording: Recording, seam: Seam, shapes: SeamShapes) -> Tensor:
    """x alone."""
    tokens, _, width = seam.streams_TME.shape
    x_TE = recording.empty((tokens, width), torch.bfloat16)
    _record(recording, seam, shapes, _Outgoing(None, x_TE, None, None))
    return x_TE


def record_post(
    recording: Recording, incoming: Incoming, streams_TME: Tensor, threads: int
) -> Tensor:
    """``hc_post`` by blocks of ``threads`` threads."""
    check_streams(streams_TME)
    check_incoming(incoming, streams_TME)
    _, streams, width = streams_TME.shape
    count = _columns(8, width, is_aligned(incoming.y) and is_aligned(streams_TME))
    defines = ("STREAMS", streams), ("COUNT", count)
    kernel = Kernel("hyper_connection/hyper_connection_post", "hc_post", defines)
    blocks = ceil_div(width, count * threads)
    out_TME = recording.empty_like(streams_TME)
    recording.launch(
        lambda tokens: Shape(kernel, (blocks, tokens), threads),
        y=incoming.y,
        streams=streams_TME,
        post=incoming.post,
        comb=incoming.comb,
        out=out_TME,
        width=width,
    )
    return out_TME


class _Outgoing(NamedTuple):
    """What a seam writes; None where it does not."""

    streams: Tensor | None
    x: Tensor
    post: Tensor | None
    comb: Tensor | None


def _record(recording: Recording, seam: Seam, shapes: SeamShapes, out: _Outgoing) -> None:
    partials = recording.empty((shapes.partial_rows, seam.mixes + 1), torch.float32)
    incoming = seam.incoming
    weights = seam.weights
    recording.launch(
        shapes.mix,
        y=incoming.y if incoming else None,
        streams=seam.streams_TME,
        post=incoming.post if incoming else None,
        comb=incoming.comb if incoming else None,
        fn=weights.fn,
        streams_out=out.streams,
        partials=partials,
        width=seam.width,
    )
    recording.launch(
        shapes.finish,
        streams=seam.streams_TME if out.streams is None else out.streams,
        partials=partials,
        base=weights.base,
        scale=weights.scale,
        norm_weight=seam.norm_weight,
        x=out.x,
        post=out.post,
        comb=out.comb,
        width=seam.width,
        norm_eps=weights.norm_eps,
        hc_eps=weights.hc_eps,
        iterations=weights.sinkhorn_iters if isinstance(weights, HcWeights) else 0,
    )
