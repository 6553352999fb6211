"""The memory of a device in which it gets values from others, in bytes."""

from itertools import pairwise

import torch

from dsv4.caches.allocation import COMPUTE_DTYPES, step_tokens
from dsv4.channels import COUNT_BYTES, WORD_BYTES, Ends, value_bytes
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.integers import ceil_div
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.parallel.placement import Placement
from dsv4.peers import SLOTS, InboxLayout


def arrival_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """The streams of the longest step, which arrive from another device."""
    itemsize = COMPUTE_DTYPES[engine.compute_dtype].itemsize
    return step_tokens(engine) * config.hc_mult * config.hidden_size * itemsize


def channel_words(
    config: ModelConfig, engine: EngineConfig, placement: Placement
) -> dict[Ends, int]:
    """Words of every channel between the devices of a decode step: for the streams of 8 tokens
    between neighbours, for hidden states from the last device to the others, and for the logits
    that these send back.
    """
    itemsize = COMPUTE_DTYPES[engine.compute_dtype].itemsize
    row_bytes = config.hidden_size * itemsize
    hidden = _words(row_bytes)
    streams = _words(config.hc_mult * row_bytes)
    *_, last = placement.layer_devices
    others = [device for device in placement.devices if device != last]
    values = {(last, other): hidden for other in others}
    values |= {(other, last): ceil_div(config.vocab_size, 1 + len(others)) for other in others}
    for source, target in pairwise(placement.layer_devices):
        if source != target:
            between = values.get((source, target), 0)
            values[source, target] = max(between, streams)
    return {ends: MAX_DECODE_TOKENS * found for ends, found in values.items()}


def _words(nbytes: int) -> int:
    return nbytes // value_bytes(nbytes)


def channel_bytes(
    config: ModelConfig, engine: EngineConfig, placement: Placement
) -> dict[torch.device, int]:
    """Channels on every device: the words that it receives, and a count at either end."""
    found = dict.fromkeys(placement.devices, 0)
    for (source, target), words in channel_words(config, engine, placement).items():
        found[source] += COUNT_BYTES
        found[target] += COUNT_BYTES + WORD_BYTES * words
    return found


def exchange_bytes(config: ModelConfig, engine: EngineConfig, ranks: int) -> int:
    """What a rank shares with the others: the inbox of decode steps, and of prefill steps the
    float32 rows of its partial results, the bfloat16 rows of a sublayer's input and the int64 rows
    of chosen entries.
    """
    if ranks == 1:
        return 0
    token_bytes = (4 * SLOTS + 2) * config.hidden_size + 8 * config.index_topk
    return InboxLayout.of(config, ranks).nbytes + step_tokens(engine) * token_bytes
