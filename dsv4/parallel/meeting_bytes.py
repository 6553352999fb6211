"""The memory of a device in which it gets values from others, in bytes."""

from dsv4.caches.allocation import COMPUTE_DTYPES, step_tokens
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.peers import SLOTS, InboxLayout


def arrival_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """The streams of the longest step, which arrive from another device."""
    itemsize = COMPUTE_DTYPES[engine.compute_dtype].itemsize
    return step_tokens(engine) * config.hc_mult * config.hidden_size * itemsize


def head_memory_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """Hidden states and logits of a decode step whose head is shared by several devices."""
    itemsize = COMPUTE_DTYPES[engine.compute_dtype].itemsize
    return MAX_DECODE_TOKENS * (config.hidden_size * itemsize + 4 * config.vocab_size)


def exchange_bytes(config: ModelConfig, engine: EngineConfig, ranks: int) -> int:
    """What a rank shares with the others: the inbox of decode steps, and of prefill steps the
    float32 rows of its partial results, the bfloat16 rows of a sublayer's input and the int64 rows
    of chosen entries.
    """
    if ranks == 1:
        return 0
    token_bytes = (4 * SLOTS + 2) * config.hidden_size + 8 * config.index_topk
    return InboxLayout.of(config, ranks).nbytes + step_tokens(engine) * token_bytes
