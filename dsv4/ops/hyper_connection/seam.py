"""A seam as the kernels see it: its checks, and the launch shapes that both phases use."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div, round_up
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.launch.items import ShapeOf
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.exchange.token_share import WHOLE, TokenShare
from dsv4.ops.exchange.words import NOT_RECEIVED, Words, WordSum, incoming
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights
from dsv4.ops.hyper_connection.left_comb import Comb

# A thread that makes comb keeps the matrix in registers, 64 of them for 8 streams.
MAX_STREAMS = 8
_WARP = 32
# Warps of hc_finish that add up the mixes of post and comb: four of 20 sums each.
_SIDE_WARPS = 5


class Incoming(NamedTuple):
    """What ``hc_post`` adds to the streams: y ``[T, E]``, which may be on its way from the ranks,
    post ``[T, M]``, comb ``[T, M, M]``, which may be left.
    """

    y: Tensor | WordSum
    post: Tensor
    comb: Comb


@dataclass(frozen=True)
class SeamForm:
    """What the shapes of a seam's kernels follow from: ``streams`` M, ``width`` E, ``mixes`` rows
    of fn, whether y comes in (``post``), and the columns of one memory access of ``hc_finish``.
    """

    streams: int
    width: int
    mixes: int
    post: bool
    finish_columns: int

    @property
    def defines(self) -> Defines:
        """What every kernel of a seam is compiled with."""
        return ("STREAMS", self.streams), ("MIXES", self.mixes)


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
    def older(self) -> tuple[Tensor, ...]:
        """What ``hc_mix`` reads but the incoming y."""
        incoming = self.incoming
        own = () if incoming is None else (incoming.post, incoming.comb.matrix)
        return self.streams_TME, *own

    @property
    def form(self) -> SeamForm:
        """What is the same of the seams of other layers and ranks."""
        finish_columns = memory_columns(8, self.width, self.finish_aligned)
        post = self.incoming is not None
        return SeamForm(self.streams, self.width, self.mixes, post, finish_columns)

    def mix_columns(self, most: int) -> int:
        """Columns of one memory access of the mixing kernel, at most ``most``."""
        return memory_columns(most, self.width, self.mix_aligned)


class SeamShapes(NamedTuple):
    """How a seam's kernels are launched.

    ``partial_rows``: of MIXES + 1 partial sums each: the most tokens × splits of any step.
    ``mix_takes``: what only one of the mixing kernels knows: ``words`` of sums that come from
    ranks, or the ``owner`` of a share of the tokens. ``leaves``: whether ``hc_finish`` leaves comb.
    """

    mix: Shape | ShapeOf
    finish: Shape | ShapeOf
    partial_rows: int
    mix_takes: Literal["words", "owner"] = "words"
    leaves: bool = False


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
        mix_aligned = mix_aligned and is_aligned_result(incoming.y)
        mix_aligned = mix_aligned and is_aligned(incoming.post)
        mix_aligned = mix_aligned and is_aligned(incoming.comb.matrix)
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
    if isinstance(incoming.y, Tensor):
        expect("y_TE", incoming.y, torch.bfloat16, (tokens, width))
    expect("post_TM", incoming.post, torch.float32, (tokens, streams))
    expect("comb_TMM", incoming.comb.matrix, torch.float32, (tokens, streams, streams))


def is_aligned_result(y: Tensor | WordSum) -> bool:
    """Whether the rows of a sublayer's result can be read in vectors of 16 bytes."""
    return isinstance(y, WordSum) or is_aligned(y)


def words_of(recording: Recording, y: Tensor | WordSum | None) -> Words:
    """What a kernel gets that reads a sublayer's result."""
    return incoming(recording, y) if isinstance(y, WordSum) else NOT_RECEIVED


def memory_columns(most: int, width: int, aligned: bool) -> int:
    """Columns of one access: ``most`` where the width and all addresses allow it, else 1."""
    return most if aligned and width % most == 0 else 1


def finish_shape(
    form: SeamForm,
    tokens: int,
    splits: int,
    blocks: int,
    most_workers: int,
    share: TokenShare = WHOLE,
    leaves: bool = False,
) -> Shape:
    """``hc_finish`` by ``blocks`` blocks for each token of a share, of at most ``most_workers``
    threads.

    Another warp of the first block computes post and comb beside them, or ``leaves`` comb. Where
    blocks share a token it has others that help, and is not waited for.
    """
    sides = _SIDE_WARPS if blocks > 1 and form.mixes > form.streams else 1
    count = form.finish_columns
    accesses = ceil_div(form.width, count)
    groups = ceil_div(accesses, blocks * most_workers)
    workers = round_up(ceil_div(accesses, blocks * groups), _WARP)
    defines = (
        *form.defines,
        ("SPLITS", splits),
        ("COUNT", count),
        ("GROUPS", groups),
        ("WORKERS", workers),
        ("SIDES", sides),
        ("BLOCKS", blocks),
        *((("LEAVES", 1),) if leaves else ()),
        *share.sender_defines,
    )
    kernel = Kernel("hyper_connection/hyper_connection_finish", "hc_finish", defines)
    grid = blocks, share.rows(tokens)
    numbers = {"tokens": tokens}
    return Shape(kernel, grid, workers + sides * _WARP, cluster=blocks, numbers=numbers)


def mix_shape(
    seam: Seam, multiprocessors: int, tokens: int, words: Defines = (), settled: bool = False
) -> Shape:
    """``hc_mix``: ``mix_splits`` blocks share the columns of up to 8 tokens. ``words``: the defines
    for y that comes from the ranks. ``settled``: all that it reads but y is (``Seam.older``).
    """
    per_lane, splits = _mix_plan(seam, multiprocessors)
    block_tokens = min(tokens, MAX_DECODE_TOKENS)
    form = seam.form
    defines = (
        *form.defines,
        ("POST", int(form.post)),
        ("TOKENS", block_tokens),
        ("COUNT", seam.mix_columns(4)),
        ("PER_LANE", per_lane),
        *((("SETTLED", 1),) if settled else ()),
        *(seam.incoming.comb.defines if seam.incoming else ()),
        *words,
    )
    kernel = Kernel("hyper_connection/hyper_connection", "hc_mix", defines)
    grid = splits, ceil_div(tokens, block_tokens)
    numbers = {"tokens": tokens}
    return Shape(kernel, grid, 8 * _WARP, numbers=numbers, settles=not form.post)


def mix_splits(seam: Seam, multiprocessors: int) -> int:
    """Splits of the columns by ``hc_mix``."""
    return _mix_plan(seam, multiprocessors)[1]


def _mix_plan(seam: Seam, multiprocessors: int) -> tuple[int, int]:
    """(accesses per lane, blocks): no more blocks than multiprocessors, if two accesses suffice."""
    accesses = ceil_div(seam.width, seam.mix_columns(4))
    one, two = (ceil_div(accesses, per_lane * _WARP // seam.streams) for per_lane in (1, 2))
    return (1, one) if one <= multiprocessors else (2, two)
