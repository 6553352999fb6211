"""Choosing a token from the logits of the real vocabulary."""

from collections.abc import Callable, Iterator

import torch

from dsv4.ops.op_case import OpCase
from dsv4.ops.sampling.cuda import argmax_token, sample_token

VOCABULARY = 129_280
DRAWS = {"temperature": (1.0, 0.0), "min-p 0.05": (1.0, 0.05), "top-p 0.95": (0.95, 0.0)}


def cases() -> Iterator[OpCase]:
    """Greedy, and draws with every restriction. In a step the logits have just been written, here they are cold."""
    nbytes = 4 * VOCABULARY
    yield OpCase("argmax_token", "greedy", _greedy, nbytes, VOCABULARY, nbytes)
    for name, (top_p, min_p) in DRAWS.items():
        yield OpCase("sample_token", name, _draw(top_p, min_p), nbytes, 10 * VOCABULARY, nbytes)


def _greedy(index: int) -> Callable[[], object]:
    logits_V = 3 * torch.randn(VOCABULARY, device="cuda")
    return lambda: argmax_token(logits_V)


def _draw(top_p: float, min_p: float) -> Callable[[int], Callable[[], object]]:
    def make(index: int) -> Callable[[], object]:
        logits_V = 3 * torch.randn(VOCABULARY, device="cuda")
        position_1 = torch.tensor([index], device="cuda")
        return lambda: sample_token(logits_V, 1.0, top_p, min_p, 7, position_1)

    return make
