"""The ops of hyper-connections, recorded: two launches a seam, shaped by the phase.

A mixing kernel writes the streams and partial sums of fn · x and Σ x²; ``hc_finish`` the rest.

Rounding is that of ``dsv4.ops.hyper_connection``: streams, collapsed stream and normalised stream
to bfloat16, all else float32. Sinkhorn iterations stop once one changes no row or column sum by
more than 2.5e-7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.buffers import is_aligned
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.exchange.prefill import PartialSum, sum_of
from dsv4.ops.exchange.token_share import WHOLE, TokenShare, send_rows
from dsv4.ops.exchange.words import WordSum, peers_of
from dsv4.ops.hyper_connection import HcHeadWeights, HcWeights
from dsv4.ops.hyper_connection.left_comb import NONE_MADE, incoming_comb, leave_comb
from dsv4.ops.hyper_connection.seam import (
    Incoming,
    Seam,
    SeamShapes,
    check_incoming,
    check_streams,
    checked_seam,
    is_aligned_result,
    memory_columns,
    words_of,
)

Result = Tensor | WordSum | PartialSum


@dataclass(frozen=True)
class RecordedOps:
    """The ops of ``dsv4.ops.hyper_connection`` for 1 to 8 bfloat16 streams. A sublayer's result may
    be on its way from the ranks, as words or as partial results.

    ``shapes``: of the two launches of a seam. ``post_threads``: of a block of ``hc_post``.
    ``share(recording, M, E)``: the tokens whose streams a rank has behind the first seam. What goes
    into a sublayer, and the final hidden state, is whole on every rank. Every op raises
    ``ValueError`` for a dtype, shape or layout that the kernels do not take.
    """

    shapes: Callable[[Recording, Seam, TokenShare], SeamShapes]
    post_threads: int
    share: Callable[[Recording, int, int], TokenShare]

    def hc_pre(
        self, recording: Recording, streams_TME: Tensor, weights: HcWeights, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dsv4.ops.hyper_connection.hc_pre``."""
        seam = checked_seam(streams_TME, None, weights, norm_weight)
        tokens, streams, width = streams_TME.shape
        x_TE = recording.empty((tokens, width), torch.bfloat16)
        post_TM = recording.empty((tokens, streams), torch.float32)
        comb_TMM = recording.empty((tokens, streams, streams), torch.float32)
        self._record(recording, seam, _Outgoing(None, x_TE, post_TM, comb_TMM), WHOLE)
        return x_TE, post_TM, comb_TMM

    def hc_seam(
        self,
        recording: Recording,
        y_TE: Result,
        streams_TME: Tensor,
        post_TM: Tensor,
        comb_TMM: Tensor,
        weights: HcWeights,
        norm_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``dsv4.ops.hyper_connection.hc_seam``; the streams are written to new memory."""
        share = self._share(recording, streams_TME)
        y = _arrived(recording, y_TE, share)
        found = Incoming(y, post_TM, incoming_comb(recording, comb_TMM))
        seam = checked_seam(streams_TME, found, weights, norm_weight)
        tokens, _, width = streams_TME.shape
        new_streams_TME = recording.empty_like(streams_TME)
        x_TE = recording.empty((tokens, width), torch.bfloat16)
        new_post_TM = recording.empty_like(post_TM)
        new_comb_TMM = recording.empty_like(comb_TMM)
        out = _Outgoing(new_streams_TME, x_TE, new_post_TM, new_comb_TMM)
        self._record(recording, seam, out, share)
        return new_streams_TME, x_TE, new_post_TM, new_comb_TMM

    def hc_head(
        self, recording: Recording, streams_TME: Tensor, weights: HcHeadWeights, norm_weight: Tensor
    ) -> Tensor:
        """``dsv4.ops.hyper_connection.hc_head``."""
        seam = checked_seam(streams_TME, None, weights, norm_weight)
        tokens, _, width = streams_TME.shape
        x_TE = recording.empty((tokens, width), torch.bfloat16)
        share = self._share(recording, streams_TME)
        self._record(recording, seam, _Outgoing(None, x_TE, None, None), share)
        return x_TE

    def hc_post(
        self,
        recording: Recording,
        y_TE: Result,
        streams_TME: Tensor,
        post_TM: Tensor,
        comb_TMM: Tensor,
    ) -> Tensor:
        """``dsv4.ops.hyper_connection.hc_post``."""
        check_streams(streams_TME)
        share = self._share(recording, streams_TME)
        y = _arrived(recording, y_TE, share)
        comb = incoming_comb(recording, comb_TMM)
        check_incoming(Incoming(y, post_TM, comb), streams_TME)
        _, streams, width = streams_TME.shape
        words = words_of(recording, y)
        count = memory_columns(8, width, is_aligned_result(y) and is_aligned(streams_TME))
        early = bool(comb.defines) and recording.is_settled(streams_TME, post_TM, comb.matrix)
        settled = (("SETTLED", 1),) if early else ()
        of_sum = *comb.defines, *settled, *words.defines, *share.defines
        defines = ("STREAMS", streams), ("COUNT", count), *of_sum
        kernel = Kernel("hyper_connection/hyper_connection_post", "hc_post", defines)
        blocks = ceil_div(width, count * self.post_threads)
        out_TME = recording.empty_like(streams_TME)
        recording.launch(
            lambda tokens: Shape(
                kernel,
                (blocks, share.rows(tokens)),
                self.post_threads,
                numbers={"tokens": tokens},
            ),
            y=y if isinstance(y, Tensor) else None,
            streams=streams_TME,
            post=post_TM,
            comb=comb.matrix,
            out=out_TME,
            **comb.arguments,
            **words.arguments,
            owner=share.owner,
            width=width,
        )
        return out_TME

    def _share(self, recording: Recording, streams_TME: Tensor) -> TokenShare:
        return self.share(recording, *streams_TME.shape[1:])

    def _record(
        self, recording: Recording, seam: Seam, out: "_Outgoing", share: TokenShare
    ) -> None:
        words = words_of(recording, None if seam.incoming is None else seam.incoming.y)
        shapes = self.shapes(recording, seam, share)
        partials = recording.empty((shapes.partial_rows, seam.mixes + 1), torch.float32)
        incoming = seam.incoming
        weights = seam.weights
        of_comb = incoming.comb.arguments if incoming else NONE_MADE
        of_words = {**words.arguments, **of_comb}
        own = of_words if shapes.mix_takes == "words" else {"owner": share.owner}
        left_TMM = out.comb if shapes.leaves else None
        unbalanced_TMM = None if left_TMM is None else recording.empty_like(left_TMM)
        recording.launch(
            shapes.mix,
            y=incoming.y if incoming and isinstance(incoming.y, Tensor) else None,
            streams=seam.streams_TME,
            post=incoming.post if incoming else None,
            comb=incoming.comb.matrix if incoming else None,
            fn=weights.fn,
            streams_out=out.streams,
            partials=partials,
            width=seam.width,
            **own,
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
            comb=out.comb if unbalanced_TMM is None else unbalanced_TMM,
            peers=recording.peers.table_P if recording.peers and share.owners > 1 else None,
            owner=share.owner,
            width=seam.width,
            norm_eps=weights.norm_eps,
            hc_eps=weights.hc_eps,
            iterations=weights.sinkhorn_iters if isinstance(weights, HcWeights) else 0,
        )
        if left_TMM is not None and unbalanced_TMM is not None:
            assert isinstance(weights, HcWeights)
            leave_comb(recording, unbalanced_TMM, left_TMM, weights)
        if share.owners > 1:
            send_rows(recording, out.x, peers_of(recording).inputs_TE)


def _arrived(recording: Recording, y: Result, share: TokenShare) -> Tensor | WordSum:
    """Partial results are added before; words by the kernel that reads them."""
    return sum_of(recording, y, share) if isinstance(y, PartialSum) else y


class _Outgoing(NamedTuple):
    """What a seam writes; None where it does not."""

    streams: Tensor | None
    x: Tensor
    post: Tensor | None
    comb: Tensor | None
