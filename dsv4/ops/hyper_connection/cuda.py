"""Hyper-connections on the GPU: two launches for a seam, ``hc_mix`` (streams, partial mixes) and ``hc_finish``.

Rounding is that of ``dsv4.ops.hyper_connection``: streams, collapsed stream and normalised stream to bfloat16, all else
float32. Sinkhorn iterations stop once one changes no row or column sum by more than 2.5e-7.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.launch.loader import Launch, launch, multiprocessors, prepare
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights
from dsv4.ops.remembered import layouts, remembered

_MAX_STREAMS = 8
_DECODE_TOKENS = 8
_WARP = 32
_TILE_TOKENS, _CHUNK_BYTES = 16, 64


@dataclass(frozen=True)
class _Shape:
    tokens: int
    streams: int
    width: int
    mixes: int
    device: torch.device

    def columns(self, most: int, *tensors: Tensor) -> int:
        """Columns of one memory access: ``most`` where the width and all addresses allow it, else 1."""
        aligned = self.width % most == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        return most if aligned else 1


class _Incoming(NamedTuple):
    """What ``hc_post`` adds to the streams: y ``[T, E]``, post ``[T, M]``, comb ``[T, M, M]``."""

    y: Tensor
    post: Tensor
    comb: Tensor


class _Seam(NamedTuple):
    """Both launches, called with the tensors that differ from step to step, and the shape of what is between them."""

    mix: Launch
    finish: Launch
    partials: tuple[int, int, int]


def hc_pre(streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``dsv4.ops.hyper_connection.hc_pre`` for bfloat16 streams of up to 8 streams; ``ValueError`` for others."""
    return _collapse(streams_TME.contiguous(), weights, norm_weight)


def hc_seam(
    y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor, weights: HcWeights, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dsv4.ops.hyper_connection.hc_seam`` for bfloat16 y and streams; the streams are written to new memory."""
    streams_TME, incoming = streams_TME.contiguous(), _contiguous(y_TE, post_TM, comb_TMM)
    seam = _seam(streams_TME, incoming, weights, norm_weight)
    # What goes out is shaped like what comes in.
    out_TME = torch.empty_like(streams_TME)
    out_x_TE, out_post_TM, out_comb_TMM = map(torch.empty_like, incoming)
    if streams_TME.shape[0]:
        partials = out_post_TM.new_empty(seam.partials)
        seam.mix(incoming.y, streams_TME, incoming.post, incoming.comb, out_TME, partials)
        seam.finish(out_TME, partials, out_x_TE, out_post_TM, out_comb_TMM)
    return out_TME, out_x_TE, out_post_TM, out_comb_TMM


def hc_head(streams_TME: Tensor, weights: HcHeadWeights, norm_weight: Tensor) -> Tensor:
    """``dsv4.ops.hyper_connection.hc_head`` for bfloat16 streams."""
    return _collapse(streams_TME.contiguous(), weights, norm_weight)[0]


def hc_post(y_TE: Tensor, streams_TME: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """``dsv4.ops.hyper_connection.hc_post`` for bfloat16 y and streams."""
    shape = _stream_shape(streams_TME, 0)
    incoming, streams_TME = _contiguous(y_TE, post_TM, comb_TMM), streams_TME.contiguous()
    _check_incoming(incoming, shape)
    out_TME = torch.empty_like(streams_TME)
    if out_TME.numel():
        count = shape.columns(8, incoming.y, streams_TME, out_TME)
        threads = 64 if shape.tokens <= _DECODE_TOKENS else 128
        launch(
            "hyper_connection_post",
            "hc_post",
            (-(-shape.width // (count * threads)), shape.tokens),
            threads,
            incoming.y,
            streams_TME,
            incoming.post,
            incoming.comb,
            out_TME,
            shape.width,
            device=shape.device,
            defines=(("STREAMS", shape.streams), ("COUNT", count)),
        )
    return out_TME


def _collapse(
    streams_TME: Tensor, weights: HcWeights | HcHeadWeights, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x, post and comb of contiguous streams; post and comb are empty for the head."""
    seam = _seam(streams_TME, None, weights, norm_weight)
    tokens, streams, width = streams_TME.shape
    mixed = streams if isinstance(weights, HcWeights) else 0
    x_TE = streams_TME.new_empty((tokens, width))
    post_TM, comb_TMM = weights.base.new_empty((tokens, mixed)), weights.base.new_empty((tokens, mixed, mixed))
    if tokens:
        partials = weights.base.new_empty(seam.partials)
        seam.mix(streams_TME, streams_TME, partials)
        seam.finish(streams_TME, partials, x_TE, post_TM, comb_TMM)
    return x_TE, post_TM, comb_TMM


def _seam(
    streams_TME: Tensor, incoming: _Incoming | None, weights: HcWeights | HcHeadWeights, norm_weight: Tensor
) -> _Seam:
    """The launches for these contiguous tensors."""
    arguments = (streams_TME, incoming, weights, norm_weight)
    return remembered(weights, (norm_weight,), layouts(streams_TME, *(incoming or ())), _prepare_seam, *arguments)


def _prepare_seam(
    streams_TME: Tensor, incoming: _Incoming | None, weights: HcWeights | HcHeadWeights, norm_weight: Tensor
) -> _Seam:
    shape = _checked(streams_TME, weights, norm_weight)
    read, collapsed = (streams_TME, weights.fn), (streams_TME, norm_weight)
    if incoming is not None:
        _check_incoming(incoming, shape)
        # The streams that are collapsed are new memory, which is aligned.
        read, collapsed = (*read, incoming.y), (norm_weight,)
    mix, splits = _mix(shape, weights.fn, incoming is not None, read)
    finish = _finish(shape, weights, norm_weight, splits, shape.columns(8, *collapsed))
    return _Seam(mix, finish, (shape.tokens, shape.mixes + 1, splits))


def _mix(shape: _Shape, fn: Tensor, post: bool, read: tuple[Tensor, ...]) -> tuple[Launch, int]:
    """The launch that takes (if ``post``) y, the streams, (if ``post``) post and comb, memory for the streams and for
    partial sums ``[T, mixes + 1, splits]`` of fn · x and Σ x², and splits.
    """
    common = (("STREAMS", shape.streams), ("MIXES", shape.mixes), ("POST", int(post)))
    if shape.tokens > _DECODE_TOKENS and shape.streams <= 4 and shape.columns(8, *read) == 8:
        source, function = "hyper_connection_prefill", "hc_mix_many"
        splits = _prefill_splits(shape)
        grid = (-(-shape.tokens // _TILE_TOKENS), splits)
        defines = (*common, ("SPLITS", splits))
        # Two stages of a chunk of every row that the 8 warps read. The loader raises the limit for more than 48 KB, but
        # static shared memory counts as well: exactly 48 KB would be refused.
        shared_bytes = 2 * 8 * _TILE_TOKENS * (shape.streams + post) * _CHUNK_BYTES + 16
    else:
        source, function, shared_bytes = "hyper_connection", "hc_mix", 0
        count = shape.columns(4, *read)
        per_lane, splits = _decode_plan(shape, count)
        # Tokens that share the weights in registers follow each other; blocks run side by side where there is room.
        shared_by = 1 if shape.tokens <= 2 else 2 if shape.tokens <= _DECODE_TOKENS else _DECODE_TOKENS
        grid = (splits, -(-shape.tokens // shared_by))
        defines = (*common, ("COUNT", count), ("PER_LANE", per_lane), ("TOKENS", shared_by))
    incoming = Tensor if post else None
    operands = (incoming, Tensor, incoming, incoming, fn, Tensor, Tensor, shape.tokens, shape.width)
    named = {"device": shape.device, "shared_bytes": shared_bytes, "defines": defines}
    return prepare(source, function, grid, 256, *operands, **named), splits


def _decode_plan(shape: _Shape, count: int) -> tuple[int, int]:
    """(accesses per lane, blocks): at most one block per multiprocessor, if two accesses suffice for that."""
    accesses = -(-shape.width // count)
    blocks = [-(-accesses // (per_lane * _WARP // shape.streams)) for per_lane in (1, 2)]
    return (1, blocks[0]) if blocks[0] <= multiprocessors(shape.device) else (2, blocks[1])


def _prefill_splits(shape: _Shape) -> int:
    """Splits of the columns: a power of two that gives at most two blocks per multiprocessor."""
    blocks, splits = -(-shape.tokens // _TILE_TOKENS), 1
    while blocks * splits <= multiprocessors(shape.device) and 256 * splits < shape.width:
        splits *= 2
    return splits


def _finish(shape: _Shape, weights: HcWeights | HcHeadWeights, norm_weight: Tensor, splits: int, count: int) -> Launch:
    """The launch that takes streams, partial sums, and memory for x, post and comb; ``count`` columns per access."""
    accesses = -(-shape.width // count)
    # Few tokens: four blocks share one, which shortens its loads. Many: two accesses per thread leave room for a
    # second block, which hides the latencies.
    decode = shape.tokens <= _DECODE_TOKENS
    blocks = 4 if decode and accesses >= 256 else 1
    groups = -(-accesses // (blocks * (960 if decode else 480)))
    workers = -(-accesses // (blocks * groups * _WARP)) * _WARP
    sizes = (("SPLITS", splits), ("COUNT", count), ("GROUPS", groups), ("WORKERS", workers))
    iterations = weights.sinkhorn_iters if isinstance(weights, HcWeights) else 0
    return prepare(
        *("hyper_connection_finish", "hc_finish", (blocks, shape.tokens), workers + _WARP),
        *(Tensor, Tensor, weights.base, weights.scale, norm_weight, Tensor, Tensor, Tensor),
        *(shape.width, weights.norm_eps, weights.hc_eps, iterations),
        device=shape.device,
        cluster=blocks if blocks > 1 else None,
        defines=(("STREAMS", shape.streams), ("MIXES", shape.mixes), *sizes, ("BLOCKS", blocks)),
    )


def _checked(streams_TME: Tensor, weights: HcWeights | HcHeadWeights, norm_weight: Tensor) -> _Shape:
    shape = _stream_shape(streams_TME, weights.fn.shape[0])
    streams, seam = shape.streams, isinstance(weights, HcWeights)
    mixes = (2 + streams) * streams if seam else streams
    _expect("fn", weights.fn, (mixes, streams * shape.width), torch.float32, shape.device)
    _expect("base", weights.base, (mixes,), torch.float32, shape.device)
    _expect("scale", weights.scale, (3 if seam else 1,), torch.float32, shape.device)
    _expect("norm_weight", norm_weight, (shape.width,), torch.float32, shape.device)
    return shape


def _stream_shape(streams_TME: Tensor, mixes: int) -> _Shape:
    if streams_TME.dtype != torch.bfloat16:
        raise ValueError(f"streams_TME: found {streams_TME.dtype}, expected torch.bfloat16")
    if streams_TME.dim() != 3 or not 1 <= streams_TME.shape[1] <= _MAX_STREAMS:
        raise ValueError(f"streams_TME: found {list(streams_TME.shape)}, expected [T, 1 to {_MAX_STREAMS}, E]")
    tokens, streams, width = streams_TME.shape
    return _Shape(tokens, streams, width, mixes, streams_TME.device)


def _contiguous(y_TE: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> _Incoming:
    return _Incoming(y_TE.contiguous(), post_TM.contiguous(), comb_TMM.contiguous())


def _check_incoming(incoming: _Incoming, shape: _Shape) -> None:
    _expect("y_TE", incoming.y, (shape.tokens, shape.width), torch.bfloat16, shape.device)
    _expect("post_TM", incoming.post, (shape.tokens, shape.streams), torch.float32, shape.device)
    _expect("comb_TMM", incoming.comb, (shape.tokens, shape.streams, shape.streams), torch.float32, shape.device)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: found {tensor.dtype}, expected {dtype}")
    if tuple(tensor.shape) != shape or tensor.device != device or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        found = f"{list(tensor.shape)} {layout} on {tensor.device}"
        raise ValueError(f"{name}: found {found}, expected {list(shape)} contiguous on {device}")
