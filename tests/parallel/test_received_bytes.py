"""What devices receive from others in decode steps."""

import torch

from dsv4 import EngineConfig
from dsv4.channels import value_bytes
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.parallel.placement import Placement
from dsv4.parallel.received_bytes import channel_words
from tests.ops.cases import tiny_config


def test_a_channel_has_room_for_the_largest_of_what_goes_through_it() -> None:
    """Streams go to the next device, hidden states from the last to all, logits back to it, of
    which each multiplies a part.
    """
    first, second, last = (torch.device("cuda", index) for index in range(3))
    config = tiny_config(vocab_size=1000)
    found = channel_words(
        config, EngineConfig(), Placement.pipeline([1] * 4, [first, second, last])
    )
    row = 2 * config.hidden_size
    hidden = row // value_bytes(row)
    streams = config.hc_mult * row // value_bytes(config.hc_mult * row)
    logits = 334
    assert found == {
        (first, second): MAX_DECODE_TOKENS * streams,
        (second, last): MAX_DECODE_TOKENS * max(streams, logits),
        (first, last): MAX_DECODE_TOKENS * logits,
        (last, first): MAX_DECODE_TOKENS * hidden,
        (last, second): MAX_DECODE_TOKENS * hidden,
    }
