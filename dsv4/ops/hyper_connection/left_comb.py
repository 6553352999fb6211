"""comb of a seam, left by its ``hc_finish`` to a later launch of the sublayer.

Nothing in the sublayer needs it, and its Sinkhorn iterations take longer than the sublayer's input:
whoever waits for that should not wait for these.
"""

from torch import Tensor

from dsv4.launch.items import Argument
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.left_work import LeftWork
from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection import HcWeights

NOTHING_LEFT: dict[str, Argument] = {
    "unbalanced": None,
    "comb": None,
    "hc_eps": 0.0,
    "iterations": 0,
}


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
