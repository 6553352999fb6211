"""Choosing a token from the logits of the real vocabulary."""

from collections.abc import Callable, Iterator

import torch

from dsv4.ops.immediate import TimedOp
from dsv4.ops.op_case import OpCase
from dsv4.ops.sampling.cuda import sample_token

VOCABULARY = 129_280
# (temperature, top_p, min_p, top_k)
SETTINGS = {
    "greedy": (0.0, 1.0, 0.0, 0),
    "temperature": (1.0, 1.0, 0.0, 0),
    "min-p 0.05": (1.0, 1.0, 0.05, 0),
    "top-p 0.95": (1.0, 0.95, 0.0, 0),
    "top-k 50": (1.0, 1.0, 0.0, 50),
    "top-k 50, top-p 0.95": (1.0, 0.95, 0.0, 50),
}


def cases() -> Iterator[OpCase]:
    """Greedy, and draws with every restriction.

    In a step the logits have just been written, here they are cold.
    """
    nbytes = 4 * VOCABULARY
    for name, settings in SETTINGS.items():
        flops = 10 * VOCABULARY if settings[0] else VOCABULARY
        yield OpCase("sample_token", name, _draw(*settings), nbytes, flops, nbytes)


def _draw(*settings: float) -> Callable[[int], Callable[[], object]]:
    def make(index: int) -> Callable[[], object]:
        logits_V = 3 * torch.randn(VOCABULARY, device="cuda")
        settings_4 = torch.tensor(settings, device="cuda")
        seed_1 = torch.tensor([7], device="cuda")
        position_1 = torch.tensor([index], device="cuda")
        return TimedOp(sample_token, logits_V, settings_4, seed_1, position_1).run

    return make
