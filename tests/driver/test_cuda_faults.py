"""A kernel that writes where it must not: the driver's last words are one line."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# The last op of the layers, with a kernel before it that writes to address 0 from its CALLS-th run
# on.
FAULTY_DRIVER = """
import sys
from dataclasses import replace
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.ops.tables import CUDA_TABLE
from dsv4.command.program import leave
import dsv4.parallel.devices, single_shot_inference

KERNEL = Kernel("hyper_connection/hyper_connection_post", "hc_post", (("STREAMS", 4), ("COUNT", 8)))
calls = 0

def run_faulty(target):
    global calls
    calls += 1
    if calls >= CALLS:
        recording = Recording(target, 1)
        addresses = dict.fromkeys(("y", "streams", "post", "comb", "out"))
        words = {"peers": None, "slot": 0, "rank_words": 0, "exchange": 0, "owner": 0}
        comb = {"hc_eps": 0.0, "iterations": 0}
        sizes = {"tokens": 1, "width": 4096}
        recording.launch(Shape(KERNEL, (4, 1), 64), **addresses, **comb, **words, **sizes)
        Program(recording).run(1)

def faulty(make):
    def ops_on(recording):
        ops = make(recording)

        def hc_post(*arguments):
            recording.call(lambda tokens: run_faulty(recording.target))
            return ops.hc_post(*arguments)

        return replace(ops, hc_post=hc_post)

    return ops_on

table = replace(CUDA_TABLE, decode=faulty(CUDA_TABLE.decode), prefill=faulty(CUDA_TABLE.prefill))
dsv4.parallel.devices.op_table = lambda name: table
leave(single_shot_inference.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("calls", [1, 20], ids=["prefill", "decode"])
def test_illegal_address_is_one_line_and_exit_code_2(checkpoint: Path, calls: int) -> None:
    script = FAULTY_DRIVER.replace("CALLS", str(calls))
    flags = ["--model", checkpoint, "--max-tokens", 200, "--ignore-eos", "--device", "cuda"]
    command = [sys.executable, "-c", script, *map(str, flags)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300
    )
    assert result.returncode == 2, result.stderr
    # Above it the log names the kernels that the demo's unusual geometry takes.
    *_, line = result.stderr.splitlines()
    assert line.startswith("error: CUDA: "), result.stderr
    assert result.stderr.count("error") == 1, result.stderr
    assert (result.stdout == "") == (calls == 1)


def test_memory_that_runs_out_is_one_line_and_exit_code_2(checkpoint: Path) -> None:
    """Another process has taken the memory that the plan found free: torch gets none of it."""
    script = """
import sys, torch, single_shot_inference
from dsv4.command.program import leave
import dsv4.opened_checkpoint
load_weights = dsv4.opened_checkpoint.loading_ranks
def load(*arguments, **named):
    torch.cuda.set_per_process_memory_fraction(1e-5)
    return load_weights(*arguments, **named)
dsv4.opened_checkpoint.loading_ranks = load
leave(single_shot_inference.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, "--model", str(checkpoint), "--device", "cuda"]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300
    )
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("error: memory: cuda:0 ran out of memory, the plan said "), (
        result.stderr
    )
    assert result.stderr.count("\n") == 1, result.stderr
