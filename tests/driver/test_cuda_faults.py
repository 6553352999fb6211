"""A kernel that writes where it must not: the driver's last words are one line."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# The first op of a decode step, made to write to address 0 from its 100th launch on.
FAULTY_DRIVER = """
import sys
from dataclasses import replace
from dsv4.launch.loader import launch
from dsv4.ops import tables
import dsv4.engine, single_shot_inference, torch

hc_post, calls = tables.CUDA.hc_post, 0

def faulty(y_TE, streams_TME, post_TM, comb_TMM):
    global calls
    calls += 1
    if calls >= CALLS:
        defines = (("STREAMS", 4), ("COUNT", 8))
        launch("hyper_connection_post", "hc_post", (4, 1), 64, None, None, None, None, None, 4096,
               device=y_TE.device, defines=defines)
    return hc_post(y_TE, streams_TME, post_TM, comb_TMM)

faulty_table = replace(tables.CUDA, hc_post=faulty)
dsv4.engine.op_table = lambda name: faulty_table
single_shot_inference.leave(single_shot_inference.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("calls", [1, 20], ids=["prefill", "decode"])
def test_illegal_address_is_one_line_and_exit_code_2(checkpoint: Path, calls: int) -> None:
    script = FAULTY_DRIVER.replace("CALLS", str(calls))
    flags = ["--model", checkpoint, "--max-tokens", 200, "--ignore-eos", "--device", "cuda"]
    command = [sys.executable, "-c", script, *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: CUDA: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert (result.stdout == "") == (calls == 1)


def test_memory_that_runs_out_is_one_line_and_exit_code_2(checkpoint: Path) -> None:
    """Another process has taken the memory that the plan found free: torch gets none of it."""
    script = """
import sys, torch, single_shot_inference
import dsv4.engine
load_weights = dsv4.engine.load_weights
def load(*arguments, **named):
    torch.cuda.set_per_process_memory_fraction(1e-5)
    return load_weights(*arguments, **named)
dsv4.engine.load_weights = load
single_shot_inference.leave(single_shot_inference.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, "--model", str(checkpoint), "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("error: memory: cuda:0 ran out of memory, the plan said "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
