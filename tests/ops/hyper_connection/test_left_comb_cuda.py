"""comb on the GPU, by whichever launch computes it: streams of the same bits."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection.decode import hc_post, hc_pre, hc_seam
from dsv4.ops.immediate import PreparedOp
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.gpu import assert_replay_is_eager, poison
from tests.ops.hyper_connection.exact import normal, seam_weights
from tests.ops.prepare_attention.cases import RATIOS, step

pytestmark = pytest.mark.gpu

WIDTH = 4096
STREAMS = 4


TAKERS = ("nobody", "post", "early post", "seam", "early seam", *RATIOS)


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_streams_are_those_of_a_comb_that_is_not_left(
    taker: str, tokens: int, spread: float
) -> None:
    """``taker``: who makes comb: a launch of its own ("nobody"), the kernel that mixes by it, or
    attention's launch. Spread 12: all 20 iterations change something.
    """
    torch.manual_seed(tokens)
    seam = seam_weights(STREAMS, WIDTH, spread), normal(WIDTH)
    streams_TME = normal(tokens, STREAMS, WIDTH).bfloat16()
    y_TE = normal(tokens, WIDTH).bfloat16()
    with torch.device("cuda"):
        attention = step(taker, 5, tokens, heads=9) if taker in RATIOS else None

    def sublayer(recording: Recording, y_TE: Tensor, leaves: bool) -> list[Tensor]:
        recording.traced = not leaves
        x_TE, post_TM, comb_TMM = hc_pre(recording, streams_TME, *seam)
        if attention is not None or taker.startswith("early"):
            recording.call(lambda _: None)
        if attention is not None:
            prepare_attention(recording, *attention.arguments())
        if taker == "nobody":
            recording.call(lambda *_: None, comb_TMM)
        given = y_TE, streams_TME, post_TM, comb_TMM
        if taker.endswith("seam"):
            return [x_TE, *hc_seam(recording, *given, *seam)]
        return [x_TE, post_TM, comb_TMM, hc_post(recording, *given)]

    poison(8 << 20)
    expected = [part.clone() for part in PreparedOp(sublayer, y_TE, False).run()]
    poison(8 << 20)
    leaving = PreparedOp(sublayer, y_TE, True)
    for part, own in zip(leaving.run(), expected, strict=True):
        assert torch.equal(part, own)
    if attention is None:
        assert_replay_is_eager(leaving.run)
