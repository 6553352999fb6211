"""Words of another GPU that never come, of a rank or through a channel: who waits for them gives
up, and the driver's last words are one line.
"""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from dsv4.demo import CHECKPOINT
from tests.ranks.on_gpu import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# Polls give up after five seconds; the rest is the way of the error through the driver.
MOST_SECONDS = 10
# The 20th replay of a decode step has the fault, and says so before it begins.
DRIVER = """
import sys
import dsv4.step.captured, single_shot_inference
from dsv4.command.program import leave

replays = 0
sound = dsv4.step.captured.CAPTURED.run_and_sample

def run_and_sample(step, end):
    global replays
    replays += 1
    if replays == 20:
        print("fault", file=sys.stderr, flush=True)
        FAULT
    sound(step, end)

dsv4.step.captured.CAPTURED.run_and_sample = run_and_sample
leave(single_shot_inference.main(sys.argv[1:]))
"""
TRAP = "import torch; torch.zeros(4, device='cuda:1')[torch.tensor([9], device='cuda:1')]"
FAULTS = {
    "a graph left out": (
        "for actions in step._ranks[1].with_choice.values(): actions[-1] = lambda: None"
    ),
    "a counter moved": "step._state.ranks[1].peers.step_4[:1].add_(1)",
    "a rank that traps": TRAP,
}
OF_CHANNELS = {
    "a graph left out": (
        "for actions in step.with_choice.values(): actions[0] = lambda: None",
        "words of cuda:0 for cuda:1 did not come",
    ),
    "a count moved": (
        "import torch; devices = map(torch.device, ('cuda:0', 'cuda:1')); "
        "step.step.recorded.channels.between(*devices).sent_1.add_(1 << 32)",
        "did not come",
    ),
    "a device that traps": (TRAP, ""),
}


@pytest.mark.parametrize("mode", ["full", "split"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_rank_ends_the_run_with_one_line(fault: str, mode: str) -> None:
    script = DRIVER.replace("FAULT", FAULTS[fault]).replace("CAPTURED", "CapturedRanks")
    ends_with_one_line(script, "tensor", mode)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        # The first graph of split mode sends nothing.
        ("a graph left out", "full"),
        *product(("a count moved", "a device that traps"), ("full", "split")),
    ],
)
def test_a_missing_device_ends_the_run_with_one_line(fault: str, mode: str) -> None:
    planted, expected = OF_CHANNELS[fault]
    script = DRIVER.replace("FAULT", planted).replace("CAPTURED", "CapturedStep")
    assert expected in ends_with_one_line(script, "pipeline", mode)


def ends_with_one_line(script: str, parallel: str, mode: str) -> str:
    """That line, on the standard error of the driver on two GPUs."""
    flags = ["--model", CHECKPOINT, "--gpus", 2, "--parallel", parallel, "--cuda-graph", mode]
    flags += ["--prompt", "Tell me a story.", "--max-tokens", 200, "--ignore-eos"]
    command = [sys.executable, "-c", script, *map(str, flags)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stderr is not None
    try:
        before = []
        for line in process.stderr:
            if line == "fault\n":
                break
            before.append(line)
        else:
            pytest.fail("".join(before))
        _, said = process.communicate(timeout=MOST_SECONDS)
    finally:
        process.kill()
        process.wait()
    lines = [line for line in said.splitlines() if "error" in line]
    assert process.returncode == 2, said
    assert len(lines) == 1, said
    assert lines[0].startswith("error: "), said
    return lines[0]


def test_a_host_that_is_slow_between_two_launches_is_no_fault() -> None:
    """Two seconds between the graphs of both ranks: the first one waits for the second."""
    script = f"""
import time
from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.step import captured
engine = Engine.load(
    {str(CHECKPOINT)!r},
    EngineConfig(device="cuda", gpus=2, parallel="tensor", cuda_graph="full", max_context=512),
)
greedy = SamplingParams(temperature=0)
ids = list(range(20, 40))
expected = list(engine.generate(ids, 3, greedy, ()))
decoder = engine.decoder
late = 0
for step in decoder._captured.values():
    for second in step._ranks[1].with_choice.values():
        def slow(first=second[0]):
            global late
            late += 1
            time.sleep(2)
            first()
        second[0] = slow
assert list(engine.generate(ids, 3, greedy, ())) == expected
assert late, "nobody was slow"
print("equal")
"""
    result = run_script(script)
    assert result.stdout == "equal\n", result.stderr


def test_a_rank_that_is_late_finds_all_logits() -> None:
    """Logits of a prompt follow each other at once; one rank reads them 20 ms behind the other."""
    script = f"""
import torch
from dsv4 import Engine, EngineConfig
from dsv4.step.step import Step
engine = Engine.load(
    {str(CHECKPOINT)!r},
    EngineConfig(device="cuda", gpus=2, parallel="tensor", max_context=512),
)
steps = engine.steps
expected = steps.logits(steps.run(list(range(20, 28))).clone()).cpu()
step, _ = steps._logits_step(8)
run_part = Step.run_part
def late(self, part, *rest):
    if self is step.ranks[1] and part.name == "logits":
        with torch.cuda.device(1):
            torch.cuda._sleep(40_000_000)
    run_part(self, part, *rest)
Step.run_part = late
for _ in range(10):
    step.run(8)
assert all(torch.equal(rank.logits_TV.cpu(), expected) for rank in step.ranks)
print("equal")
"""
    result = run_script(script)
    assert result.stdout == "equal\n", result.stderr
