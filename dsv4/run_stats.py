"""RunStats: how long a generation took and why it ended."""

from dataclasses import dataclass
from typing import Literal

from dsv4.logprobs import TokenLogprobs

# "interrupted": closed by the caller, or ended by an error, before its end.
FinishReason = Literal["stop", "length", "context", "interrupted"]


@dataclass(frozen=True)
class DraftStats:
    """Steps of a ``generate`` with drafts. ``drafted[i]``: steps with a draft i, from 0;
    ``accepted[i]``: those that kept it. ``tokens``: what all of the steps gave, also those without
    drafts.
    """

    steps: int
    tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float

    @property
    def tokens_per_step(self) -> float | None:
        """None without a step."""
        return self.tokens / self.steps if self.steps else None

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The share of drafts that were kept, by position."""
        return tuple(kept / made for kept, made in zip(self.accepted, self.drafted, strict=True))


@dataclass(frozen=True)
class RunStats:
    """Tokens and times of one ``generate``. The first token comes from prefill, not from decode.

    ``reused_tokens``: those of the prompt that the engine had processed before; they are not among
    ``prefill_tokens``. ``logprobs``: of every token that was yielded, with
    ``SamplingParams.logprobs``. ``drafts``: None without a draft module.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    reused_tokens: int = 0
    drafts: DraftStats | None = None
