"""How tokens are chosen: parameters, a sampler of one sequence, and its settings on the device."""

import math
import secrets
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from dsv4.errors import UserError, shorten
from dsv4.limits import MAX_LOGPROBS
from dsv4.logprobs import TokenLogprobs, rank_tokens
from dsv4.ops import Ops
from dsv4.ops.sampling import NAN_TOKEN

# Loads that can be on their way before one waits for the first of them.
_TURNS = 4
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_TOP_K = 1 << 24


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are the model's own (model.md#sampling).

    ``temperature`` 0 is greedy (lowest id on ties); else a token is drawn. ``top_k`` most likely
    tokens are left first, 0: all. ``top_p`` in (0, 1] leaves the fewest most likely ones with
    together this probability, ``min_p`` in [0, 1] those with this share of the largest one.
    ``seed``, from 0 to 2^63 − 1, makes draws repeatable; None draws a fresh one. ``logprobs``, from
    0 to 1000, changes no token: with every one its log-probability and this many most likely ones
    are noted, for ``RunStats.logprobs``; None notes nothing. Numbers of numpy are as good as
    Python's. Raises ``UserError`` for values out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    top_k: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check(
            "temperature", lambda v: 0 <= v <= sys.float_info.max, "a finite number, 0 or more"
        )
        self._check("top_p", lambda v: 0 < v <= 1, "a number above 0 up to 1")
        self._check("min_p", lambda v: 0 <= v <= 1, "a number from 0 to 1")
        if self.logprobs is not None:
            self._check(
                "logprobs",
                lambda v: isinstance(v, int) and 0 <= v <= MAX_LOGPROBS,
                f"an integer from 0 to {MAX_LOGPROBS}",
            )
        self._check("top_k", lambda v: isinstance(v, int) and v >= 0, "an integer, 0 or more")
        if self.seed is not None:
            self._check(
                "seed",
                lambda v: isinstance(v, int) and 0 <= v < 2**63,
                "an integer from 0 to 2**63 - 1",
            )

    def _check(self, field: str, in_range: Callable[[float], bool], expected: str) -> None:
        value = self.__dict__[field]
        number = _plain_number(value)
        if number is None or not in_range(number):
            raise UserError(f"{field}: found {shorten(value)}, expected {expected}")
        object.__setattr__(self, field, number)


def _plain_number(value: object) -> float | None:
    """A number as one of Python, which JSON has and which does not overflow; None for another
    value, for booleans and for what float64 cannot hold.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:
        return None


class Sampler:
    """How one sequence's tokens are chosen: the parameters with their seed, and what is noted of
    every choice.

    ``noted``: with ``SamplingParams.logprobs`` one entry for every token that the host has read, of
    the run that began last.

    The noise of a draw depends on the seed, the position and the token id only.
    """

    def __init__(self, params: SamplingParams) -> None:
        """Raises ``UserError`` for anything but ``SamplingParams``."""
        if not isinstance(params, SamplingParams):
            raise UserError(f"sampling: found {shorten(params)}, expected SamplingParams(...)")
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.noted: list[TokenLogprobs] = []

    def note(self, logits_V: Tensor, token: Tensor) -> None:
        """Waits for the device and notes the choice of ``token``, if choices are noted."""
        count = self.params.logprobs
        if count is not None:
            self.add(TokenLogprobs.of(*rank_tokens(logits_V, token, count)))

    def add(self, choice: TokenLogprobs) -> None:
        """Notes a choice. Raises ``FloatingPointError`` where a log-probability is not finite, as
        with an infinite logit.
        """
        for value in (choice.logprob, *(logprob for _, logprob in choice.top)):
            if not math.isfinite(value):
                raise FloatingPointError(f"log-probability of token {choice.token_id}: {value}")
        self.noted.append(choice)

    def settings(self) -> tuple[tuple[float, float, float, float], int]:
        """(temperature, top_p, min_p, top_k) and the seed, for ``dsv4.ops.sampling.sample_token``.

        A positive temperature or top_p that float32 would turn into 0 or infinity is moved into its
        range, and a top_k beyond any vocabulary to where it is still an integer.
        """
        temperature = float(self.params.temperature)
        if temperature > 0:
            temperature = min(max(temperature, _SMALLEST), _LARGEST)
        top_p = max(float(self.params.top_p), _SMALLEST)
        top_k = float(min(self.params.top_k, _LARGEST_TOP_K))
        return (temperature, top_p, float(self.params.min_p), top_k), self.seed


@dataclass(frozen=True)
class _Settings:
    """float32 (temperature, top_p, min_p, top_k) and the int64 seed, views of the same memory."""

    words: Tensor
    settings_4: Tensor
    seed_1: Tensor

    @classmethod
    def allocate(cls, device: torch.device, pinned: bool) -> "_Settings":
        words = torch.zeros(3, dtype=torch.int64, device=device, pin_memory=pinned)
        return cls(words, words[1:].view(torch.float32)[:4], words[:1])

    def write(self, sampler: Sampler) -> None:
        """Writes the settings from the host, into memory of the CPU."""
        settings, seed = sampler.settings()
        for index, value in enumerate(settings):
            self.settings_4[index] = value
        self.seed_1[0] = seed


@dataclass(frozen=True)
class SamplerState:
    """The settings that steps read: static memory, so that one captured step serves every sampler.

    ``settings_4`` float32 ``[4]``: temperature, top_p, min_p and top_k; ``seed_1`` int64 ``[1]``;
    both on the device that samples. Greedy until a sampler is loaded.
    """

    settings_4: Tensor
    seed_1: Tensor
    _static: _Settings
    # Pinned memory and when its last copy was done; without CUDA there is nothing to wait for.
    _turns: deque[tuple[_Settings, torch.cuda.Event]]

    @classmethod
    def allocate(cls, device: torch.device) -> "SamplerState":
        """State on ``device``."""
        static = _Settings.allocate(device, pinned=False)
        turns: deque[tuple[_Settings, torch.cuda.Event]] = deque()
        if device.type == "cuda":
            cpu = torch.device("cpu")
            for _ in range(_TURNS):
                turns.append((_Settings.allocate(cpu, pinned=True), torch.cuda.Event()))
        return cls(static.settings_4, static.seed_1, static, turns)

    def load(self, sampler: Sampler) -> None:
        """Queues the sampler's settings on the device's current stream, for the steps behind it.

        Waits only where the copy from the same pinned memory, four loads ago, is not done yet.
        """
        if not self._turns:
            self._static.write(sampler)
            return
        pinned, copied = self._turns[0]
        self._turns.rotate(-1)
        copied.synchronize()
        pinned.write(sampler)
        self._static.words.copy_(pinned.words, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._static.words.device))

    def choose(self, ops: Ops, logits_V: Tensor, position_1: Tensor) -> Tensor:
        """``ops.sample_token`` with these settings."""
        return ops.sample_token(logits_V, self.settings_4, self.seed_1, position_1)


def checked_token(token: int, position: int, met_nan: bool = False) -> int:
    """The token, if it is one and nothing on the way to it ``met_nan``.

    Raises ``FloatingPointError`` for anything else, naming the tokens before it.
    """
    if token == NAN_TOKEN or met_nan:
        raise FloatingPointError(f"NaN after {position} tokens")
    return token
