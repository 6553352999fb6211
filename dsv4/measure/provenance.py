"""Where a measurement comes from: machine, versions, commit and command."""

import importlib.metadata
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
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": command,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": _cpu_name(), "torch_threads": torch.get_num_threads(), "gpus": gpus},
        "versions": {
            "dsv4": dsv4.__version__,
            "nvrtc": version_of("nvidia-cuda-nvrtc"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
    }


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this code, "+changes" behind it where the working tree has any; "unknown" where
    the package is not in a repository of its own.
    """
    if _git("rev-parse", "--show-toplevel") != str(ROOT):
        return "unknown"
    return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    """What git says of the folder of this code, nothing where it fails or is not installed."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
