"""The CUDA forms of ``DraftOps``: of 1 to 8 tokens and of more."""

from functools import partial

from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops import Ops
from dsv4.ops.attention import decode as attention
from dsv4.ops.draft_rows import cuda as draft_rows
from dsv4.ops.drafts import DraftOps
from dsv4.ops.kv_write import decode as kv_decode
from dsv4.ops.kv_write import prefill as kv_prefill
from dsv4.ops.markov import cuda as markov
from dsv4.ops.stream_means import cuda as stream_means


def draft_ops(recording: Recording, ops: Ops) -> DraftOps:
    """Those that write to ``recording``, beside ``ops``, which write to it too."""
    is_decode = recording.tokens <= MAX_DECODE_TOKENS
    kv_write = kv_decode.kv_write if is_decode else kv_prefill.kv_write
    return DraftOps(
        kv_write=partial(kv_write, recording),
        block_attention=partial(attention.block_attention, recording),
        stream_means=partial(stream_means.stream_means, recording),
        token_mixing=partial(draft_rows.token_mixing, recording),
        stream_linear=partial(draft_rows.stream_linear, ops.linear_rows, recording),
        markov_logits=partial(markov.markov_logits, recording),
    )
