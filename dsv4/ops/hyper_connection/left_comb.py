"""comb of a seam, left by its ``hc_finish``.

Nothing in the sublayer needs it, and its Sinkhorn iterations take longer than the sublayer's input:
whoever waits for that should not wait for these. Attention has a launch that makes it on the way.
Otherwise the kernel that mixes the streams at the sublayer's end makes it for itself.
"""

from typing import NamedTuple

from torch import Tensor

from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Argument
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.left_work import LeftWork
from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection import HcWeights

# The arguments of a kernel that makes no comb for itself, and of one that takes none along.
NONE_MADE: dict[str, Argument] = {"hc_eps": 0.0, "iterations": 0}
NOTHING_LEFT: dict[str, Argument] = {"unbalanced": None, "comb": None, **NONE_MADE}


class Comb(NamedTuple):
    """What a kernel that mixes gets: comb ``[T, M, M]``, or the matrix that it makes comb of."""

    matrix: Tensor
    defines: Defines
    arguments: dict[str, Argument]


def leave_comb(
    recording: Recording, unbalanced_TMM: Tensor, comb_TMM: Tensor, weights: HcWeights
) -> None:
    """The last item has left ``comb_TMM``, of which it has made ``unbalanced_TMM``, float32: rows
    of a softmax, plus eps.
    """
    tokens, streams, _ = comb_TMM.shape
    defines = (("STREAMS", streams),)
    kernel = Kernel("hyper_connection/hyper_connection_balance", "hc_balance", defines)
    arguments: dict[str, Argument] = {
        "unbalanced": unbalanced_TMM,
        "comb": comb_TMM,
        "hc_eps": weights.hc_eps,
        "iterations": weights.sinkhorn_iters,
    }
    recording.leave(LeftWork(Shape(kernel, tokens, 32), arguments, (comb_TMM,)))


def left_comb(recording: Recording) -> tuple[int, dict[str, Argument]]:
    """The streams of a seam whose comb the next launch can compute in front of its wait, and what
    it gets for that; 0 streams: there is none.
    """
    work = recording.left()
    if work is None:
        return 0, NOTHING_LEFT
    unbalanced_TMM = work.arguments["unbalanced"]
    assert isinstance(unbalanced_TMM, Tensor)
    if not recording.is_settled(unbalanced_TMM):
        return 0, NOTHING_LEFT
    return unbalanced_TMM.shape[1], work.arguments


def incoming_comb(recording: Recording, comb_TMM: Tensor) -> Comb:
    """For the kernel that mixes by ``comb_TMM``, which is recorded next."""
    work = recording.left()
    if work is None or storage_key(work.results[0]) != storage_key(comb_TMM):
        return Comb(comb_TMM, (), NONE_MADE)
    unbalanced_TMM = work.arguments["unbalanced"]
    assert isinstance(unbalanced_TMM, Tensor)
    return Comb(unbalanced_TMM, (("LEFT", 1),), {name: work.arguments[name] for name in NONE_MADE})
