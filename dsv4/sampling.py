"""SamplingParams and the sampler that applies them with the op table's kernels."""

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dsv4.errors import UserError, shorten
from dsv4.ops import Ops
from dsv4.ops.sampling import NAN_TOKEN


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are the model's own (spec §10).

    ``temperature`` 0 is greedy (lowest id on ties). ``top_p`` in (0, 1], ``min_p`` in [0, 1]. ``seed`` None draws a
    fresh one. Raises ``UserError`` for values out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check("temperature", lambda v: 0 <= v <= sys.float_info.max, "a finite number, 0 or more")
        self._check("top_p", lambda v: 0 < v <= 1, "a number above 0 up to 1")
        self._check("min_p", lambda v: 0 <= v <= 1, "a number from 0 to 1")
        if self.seed is not None:
            self._check("seed", lambda v: isinstance(v, int) and 0 <= v < 2**63, "an integer from 0 to 2**63 - 1")

    def _check(self, field: str, in_range: Callable[[float], bool], expected: str) -> None:
        value = self.__dict__[field]
        if not isinstance(value, int | float) or isinstance(value, bool) or not in_range(value):
            raise UserError(f"{field}: found {shorten(value)}, expected {expected}")


class Sampler:
    """Draws tokens for one sequence; the noise depends on the seed, the position and the token id only."""

    def __init__(self, params: SamplingParams, ops: Ops) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._ops = ops

    @property
    def key(self) -> tuple[SamplingParams, int]:
        """Equal for samplers that draw the same tokens of the same logits."""
        return self.params, 0 if self.params.temperature == 0 else self.seed

    def __call__(self, logits_V: Tensor, position_1: Tensor) -> Tensor:
        """int64 scalar on the device of ``logits``; ``dsv4.ops.sampling.NAN_TOKEN`` when a logit is NaN."""
        if self.params.temperature == 0:
            return self._ops.argmax_token(logits_V)
        p = self.params
        return self._ops.sample_token(logits_V, p.temperature, p.top_p, p.min_p, self.seed, position_1)


def checked_token(token: int, position: int) -> int:
    """The token, if it is one. Raises ``FloatingPointError`` for ``NAN_TOKEN``, naming the tokens before it."""
    if token == NAN_TOKEN:
        raise FloatingPointError(f"the logits after {position} tokens contain NaN")
    return token
