"""Verdicts beside the kernel cache, one file for everything that decides them.

A file is written whole or not at all; one that is damaged, or says something else than its name,
counts as absent.
"""

import hashlib
import importlib.metadata
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from dsv4.errors import UserError
from dsv4.json_object import read_json_object
from dsv4.launch.compiler import cache_folder, keep_file
from dsv4.native.check import Outcome, Result, Verdict
from dsv4.native.run_checks import run_checks

_PACKAGES = (
    *("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-core", "cuda-bindings"),
    *("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
)
# The folders of dsv4 whose files decide what a kernel computes and what it is compared with.
_SOURCES = ("caches", "launch", "native", "ops", "parallel", "weights")
# Such a check compiles two small kernels, whose own waits end after five seconds.
_TOGETHER_SECONDS = 120.0
_LOG = logging.getLogger("dsv4")
_PACKAGE_FOLDER = Path(__file__).parent.parent
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def verdict_for(checks: str, device: torch.device, anew: bool = False) -> Verdict:
    """The verdict of the checks ``module:function`` on a device of this model: the kept one, or
    that of a child process, which is kept unless it says nothing (``Verdict.conclusive``).

    ``anew``: whatever is kept.
    """
    facts = verdict_facts(checks, device)
    path = verdict_path(facts)
    verdict = None if anew else _kept(path, facts)
    if verdict is None:
        _LOG.info("native kernels are checked on %s, once until something changes", facts["gpu"])
        verdict = run_checks(checks, device)
        if verdict.conclusive:
            keep_file(path, _content(facts, verdict))
    return verdict


def verdict_of_gpus(checks: str, devices: Sequence[torch.device]) -> Verdict:
    """The verdict of checks of what these very GPUs do together: the kept one, or that of a child
    process. Only one that passed is kept: there is no doing without, so that no fault may be said
    to be there longer than it is.
    """
    ids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    facts = {**verdict_facts(checks, devices[0]), "gpus": ids}
    path = verdict_path(facts)
    verdict = _kept(path, facts)
    if verdict is None:
        _LOG.info("%d GPUs are checked together, once until something changes", len(devices))
        verdict = run_checks(checks, devices[0], _TOGETHER_SECONDS)
        if verdict.passed:
            keep_file(path, _content(facts, verdict))
    return verdict


def verdict_facts(checks: str, device: torch.device) -> dict[str, Any]:
    """What a verdict depends on: the checks, the model of the GPU, the driver, the packages and the
    sources.
    """
    on_gpu = device.type == "cuda"
    return {
        "checks": checks,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else str(device.type),
        "driver": driver_version(),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "sources": _sources_digest(),
    }


def verdict_path(facts: dict[str, Any]) -> Path:
    """The file of the verdict that depends on ``facts``."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / f"verdict-{digest}.json"


def package_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The version of the NVIDIA kernel module, without who built it; None where there is none."""
    try:
        found = re.search(r"\d+(\.\d+)+", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found and found[0]


def _content(facts: dict[str, Any], verdict: Verdict) -> bytes:
    results = [asdict(result) for result in verdict.results]
    digest = _digest(facts, results)
    record = {"facts": facts, "results": results, "digest": digest}
    return (json.dumps(record, indent=1) + "\n").encode()


def _kept(path: Path, facts: dict[str, Any]) -> Verdict | None:
    try:
        record = read_json_object(path)
    except UserError:
        return None
    if record.keys() != {"facts", "results", "digest"} or record["facts"] != facts:
        return None
    if record["digest"] != _digest(facts, record["results"]):
        return None
    results = tuple(Result(**result) for result in record["results"])
    known = {result.outcome for result in results} <= set(get_args(Outcome))
    return Verdict(results) if known else None


def _digest(facts: dict[str, Any], results: object) -> str:
    return hashlib.sha256(json.dumps([facts, results], sort_keys=True).encode()).hexdigest()


def _sources_digest() -> str:
    digest = hashlib.sha256()
    paths = [path for name in _SOURCES for path in (_PACKAGE_FOLDER / name).rglob("*")]
    for path in sorted(paths):
        if path.suffix in (".py", ".cu", ".cuh"):
            name = path.relative_to(_PACKAGE_FOLDER).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
