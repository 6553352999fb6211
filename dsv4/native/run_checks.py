"""Runs checks of native kernels in a child process: a hang, a crash or an error of the device ends
there.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from dsv4.limited_process import TIMED_OUT, python_command, run_limited
from dsv4.native.check import Result, Verdict

# From the start to the first check, and for each check. A process that imports torch from a cold
# disk takes tens of seconds; a check compiles up to about ten kernels, most of them in less than
# 10 s, and computes for milliseconds. What is taken for a hang keeps native kernels from being
# used, so the limit is far above.
STEP_SECONDS = 300.0
# A process in a kernel that never ends takes SIGTERM at once; the driver then resets the device.
GRACE_SECONDS = 5.0
_MAX_REASON = 240


def run_checks(checks: str, device: torch.device, step_seconds: float = STEP_SECONDS) -> Verdict:
    """The verdict of the checks ``module:function`` on ``device``. Raises ``KeyboardInterrupt``."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers"
        answers.touch()
        arguments = ", ".join(map(repr, (checks, str(device), str(answers))))
        code = f"from dsv4.native.child import answer; answer({arguments})"
        log = Path(folder) / "log"
        with log.open("w", encoding="utf-8") as file:
            outcome = run_limited(
                python_command(code),
                file,
                step_seconds,
                GRACE_SECONDS,
                progress=lambda: answers.stat().st_size,
            )
        if outcome.interrupt is not None:
            raise outcome.interrupt
        fault = None
        if outcome.exit_code != 0:
            fault = _fault(outcome.exit_code, log.read_bytes(), step_seconds)
        return _verdict(checks, answers.read_bytes(), fault)


def _fault(exit_code: int, log: bytes, step_seconds: float) -> str:
    """Why the child did not come to its end."""
    if exit_code == TIMED_OUT:
        return f"no answer within {step_seconds:g} s"
    lines = log.decode("utf-8", "replace").split("\n")
    said = [" ".join(line.split()) for line in lines if line.strip()]
    # Behind the traceback torch gives advice in further lines.
    errors = [line for line in said if line.partition(":")[0].endswith(("Error", "Exception"))]
    last = (errors or said or [""])[-1][:_MAX_REASON]
    return last or f"ended with exit code {exit_code}"


def _verdict(checks: str, answers: bytes, fault: str | None) -> Verdict:
    """The results in the child's answers; ``fault`` goes to the check that it was in."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in answers.split(b"\n")[:-1]]
    if not lines:
        return Verdict((Result("start", checks, "failed", fault or "no answer"),))
    planned = lines[0]["checks"]
    begun = {line["begins"] for line in lines if "begins" in line}
    ended = {line["ends"]: line for line in lines if "ends" in line}
    results = []
    for index, (name, kernel) in enumerate(planned):
        if index in ended:
            found = ended[index]
            results.append(Result(name, kernel, found["outcome"], found["reason"]))
        elif index in begun:
            results.append(Result(name, kernel, "failed", fault or "no answer"))
        else:
            results.append(Result(name, kernel, "not run", "an earlier check ended the process"))
    if fault is not None and len(ended) == len(planned):
        results.append(Result("end", checks, "failed", fault))
    return Verdict(tuple(results))
