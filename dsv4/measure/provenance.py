"""Where a measurement comes from: machine, versions, commit and command."""

import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import dsv4

ROOT = Path(__file__).parent.parent.parent


def provenance(command: str) -> dict[str, Any]:
    """Machine, versions, commit and ``command`` of this process."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    ).stdout
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": command,
        "commit": (commit or "unknown") + ("+changes" if changed else ""),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": _cpu_name(), "torch_threads": torch.get_num_threads(), "gpus": gpus},
        "versions": {
            "dsv4": dsv4.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
