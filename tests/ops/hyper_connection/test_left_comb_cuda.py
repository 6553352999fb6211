"""comb on the GPU, by whichever launch computes it: the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection.decode import hc_post, hc_pre
from dsv4.ops.immediate import PreparedOp
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.gpu import assert_replay_is_eager, poison
from tests.ops.hyper_connection.exact import normal, seam_weights
from tests.ops.prepare_attention.cases import RATIOS, step

pytestmark = pytest.mark.gpu

WIDTH = 4096
STREAMS = 4


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("kind", [None, *RATIOS])
@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_comb_is_that_of_the_seam(kind: str | None, tokens: int, spread: float) -> None:
    """``kind``: of the attention whose launch takes it along; None: a launch of its own does it.
    Spread 12: all 20 iterations change something.
    """
    torch.manual_seed(tokens)
    weights = seam_weights(STREAMS, WIDTH, spread)
    norm_weight = normal(WIDTH)
    streams_TME = normal(tokens, STREAMS, WIDTH).bfloat16()
    y_TE = normal(tokens, WIDTH).bfloat16()
    with torch.device("cuda"):
        attention = None if kind is None else step(kind, 5, tokens, heads=9)

    def sublayer(recording: Recording, y_TE: Tensor, leaves: bool) -> list[Tensor]:
        of_seam = replace(weights, leaves=leaves)
        x_TE, post_TM, comb_TMM = hc_pre(recording, streams_TME, of_seam, norm_weight)
        if attention is not None:
            recording.call(lambda _: None)
            prepare_attention(recording, *attention.arguments())
        return [x_TE, post_TM, comb_TMM, hc_post(recording, y_TE, streams_TME, post_TM, comb_TMM)]

    poison(8 << 20)
    expected = [part.clone() for part in PreparedOp(sublayer, y_TE, False).run()]
    poison(8 << 20)
    leaving = PreparedOp(sublayer, y_TE, True)
    for part, own in zip(leaving.run(), expected, strict=True):
        assert torch.equal(part, own)
    if attention is None:
        assert_replay_is_eager(leaving.run)
