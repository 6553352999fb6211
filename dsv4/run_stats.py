"""RunStats: how long a generation took and why it ended."""

from dataclasses import dataclass
from typing import Literal

from dsv4.logprobs import TokenLogprobs

# "interrupted": closed by the caller, or ended by an error, before its end.
FinishReason = Literal["stop", "length", "context", "interrupted"]


@dataclass(frozen=True)
class RunStats:
    """Tokens and times of one ``generate``. The first token comes from prefill, not from decode.

    ``reused_tokens``: those of the prompt that the engine had processed before; they are not among
    ``prefill_tokens``. ``logprobs``: of every token that was yielded, with
    ``SamplingParams.logprobs``.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    reused_tokens: int = 0
