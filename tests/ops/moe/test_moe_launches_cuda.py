"""The decode experts' launch after others, whose counters and memory of hidden rows it shares, and
the waits of its blocks for each other.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.immediate import PreparedOp
from dsv4.ops.moe import ExpertWeights, decode
from dsv4.ops.router import Router
from tests.ops.moe.decode_cases import FP8, LIMIT, NVFP4, check, exact, moe, step, weights

pytestmark = pytest.mark.gpu

# E, F and the number of experts, fewer than Flash has.
WIDTH, INNER, COUNT = 4096, 2048, 24


def experts() -> tuple[ExpertWeights, ExpertWeights]:
    """Routed and shared ones."""
    return weights(WIDTH, INNER, COUNT, (NVFP4, FP8))


def different_step(tokens: int, seed: int) -> tuple[Tensor, Tensor, Router]:
    """Of the same router as all others of so many tokens."""
    _, tokens_T, router = step(WIDTH, COUNT, tokens)
    return step(WIDTH, COUNT, tokens, seed=seed)[0], tokens_T, router


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_same_launch_gives_the_same_bits_200_times(tokens: int) -> None:
    """Hidden rows lie in two places by turns. What a launch left there would show, because three
    inputs take turns.
    """
    layer = experts()
    steps = [different_step(tokens, seed) for seed in range(3)]
    expected = [moe(*arguments, *layer, LIMIT) for arguments in steps]
    x_TE, tokens_T, router = different_step(tokens, 3)
    op = PreparedOp(decode.moe, x_TE, tokens_T, router, *layer, LIMIT)
    found = []
    for turn in range(200):
        x_TE.copy_(steps[turn % 3][0])
        found.append(op.run().y_TE.clone())
    assert all(torch.equal(y_TE, expected[turn % 3]) for turn, y_TE in enumerate(found))


def test_launches_of_all_token_counts_follow_each_other_in_the_same_memory() -> None:
    """All in one recording, back to back. They are an odd number, so that each of them meets both
    places of hidden rows. A step with memory of its own runs in between.
    """
    layer = experts()
    order = [1, 8, 1, 2, 7, 3, 3, 8, 8, 1, 5, 4, 6, 2, 1, 1, 4, 8, 5, 7, 6, 3, 2]
    steps = [different_step(tokens, seed) for seed, tokens in enumerate(order)]
    expected = [moe(*arguments, *layer, LIMIT) for arguments in steps]
    for tokens in range(1, 9):
        at = order.index(tokens)
        check(expected[at], exact(*steps[at], *layer), f"T={tokens}")
    recording = Recording(Target.of(steps[0][0].device), 8)
    results = [
        recording.keep(decode.moe(recording, *arguments, *layer, LIMIT).y_TE) for arguments in steps
    ]
    program = Program(recording)
    other = PreparedOp(decode.moe, *steps[4], *layer, LIMIT)
    for _ in range(20):
        for result in results:
            program.tensor(result).fill_(torch.nan)
        program.run(8)
        assert torch.equal(other.run().y_TE, expected[4])
        for result, y_TE in zip(results, expected, strict=True):
            assert torch.equal(program.tensor(result), y_TE)


WAITS_FOREVER = """
from dataclasses import replace

import torch
from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.moe import decode
from tests.ops.moe.decode_cases import FP8, LIMIT, NVFP4, step, weights

target = Target.of(torch.device("cuda", 0))
blocks = target.multiprocessors + 4
recording = Recording(replace(target, multiprocessors=blocks), 1)
width = 32 * blocks
decode.moe(recording, *step(width, 8, 1), *weights(width, 1024, 8, (NVFP4, FP8)), LIMIT)
Program(recording).run(1)
torch.cuda.synchronize()
"""


def test_a_wait_that_never_ends_is_an_error() -> None:
    """More blocks than the GPU holds, and all wait for hidden rows of the last ones. In a process
    of its own, whose context is lost.
    """
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, "-c", WAITS_FOREVER], capture_output=True, text=True, timeout=90, cwd=root
    )
    assert run.returncode == 1
    assert "CUDA error" in run.stderr
