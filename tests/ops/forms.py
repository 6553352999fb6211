"""Ops with a decode and a prefill form as one op, and the parts of ``prepare_attention`` that have
two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops.compressor import decode as compressor_decode
from dsv4.ops.compressor import prefill as compressor_prefill
from dsv4.ops.immediate import immediately
from dsv4.ops.kv_write import decode as kv_write_decode
from dsv4.ops.kv_write import prefill as kv_write_prefill
from dsv4.ops.rope.cuda import DECODE_ROWS_PER_BLOCK
from dsv4.ops.rope.cuda import query_rope as rope_query_rope
from tests.ops.conftest import skipping_float32

Op = Callable[..., Any]


def by_tokens(decode: Op, prefill: Op) -> Op:
    """A launcher that takes the form for the recording's number of tokens, as the op tables do."""

    def launcher(recording: Recording, *arguments: Any, **named: Any) -> Any:
        form = decode if recording.tokens <= MAX_DECODE_TOKENS else prefill
        return form(recording, *arguments, **named)

    return launcher


query_rope = by_tokens(
    partial(rope_query_rope, rows_per_block=DECODE_ROWS_PER_BLOCK), rope_query_rope
)
kv_write = by_tokens(kv_write_decode.kv_write, kv_write_prefill.kv_write)
compress = by_tokens(compressor_decode.compress, compressor_prefill.compress)


def part(backend: str, reference: Op, launcher: Op) -> Op:
    """``reference``, or with CUDA ops what ``launcher`` records, run at once."""
    return reference if backend == "torch" else skipping_float32(immediately(launcher))
