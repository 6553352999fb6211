"""The child process of ``run_checks``: nothing of what a check breaks survives it."""

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dsv4.native.check import Check


def checks_of(name: str) -> Sequence[Check]:
    """The list that the function ``name`` (``module:function``) makes."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)()


def answer(name: str, device: str, path: str) -> None:
    """Runs the checks of ``name`` on ``device`` and ends the process.

    ``path`` gets a line of JSON for the list of checks, and one when each begins and when it ends.
    An error of the device is raised: behind it no other check would say anything.
    """
    target = torch.device(device)
    checks = checks_of(name)
    with Path(path).open("a", encoding="utf-8", buffering=1) as file:
        file.write(json.dumps({"checks": [[check.name, check.kernel] for check in checks]}) + "\n")
        for index, check in enumerate(checks):
            file.write(json.dumps({"begins": index}) + "\n")
            ended = {"ends": index, **_run(check, target)}
            file.write(json.dumps(ended) + "\n")
    # Freeing what compilers and drivers hold may fail, and nothing depends on it.
    os._exit(0)


def _run(check: Check, device: torch.device) -> dict[str, str | None]:
    try:
        with torch.inference_mode():
            reason = check.run(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"outcome": "not run", "reason": "ran out of memory"}
    return {"outcome": "passed" if reason is None else "failed", "reason": reason}
