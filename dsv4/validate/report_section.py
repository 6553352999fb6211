"""A section of a report: a measurement that runs in a process of its own, or why there is none."""

import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dsv4.limited_process import TIMED_OUT, python_command, run_limited
from dsv4.validate.device_clocks import Measured, watched_clocks

Status = Literal["done", "failed", "skipped"]
# A process that holds GPUs gets this long to let go of them.
_GRACE_SECONDS = 10.0
# What another record says of where it comes from; the report says it once.
_PROVENANCE = frozenset({"command", "commit", "date", "machine", "versions", "model"})
_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)


class Finding(NamedTuple):
    """What a section found. ``reason``: why it is not done, in one line."""

    status: Status
    reason: str | None
    result: Any


@dataclass(frozen=True)
class Section:
    """A named part of a report."""

    name: str
    run: Callable[[], Finding]

    def record(self) -> dict[str, Any]:
        """Runs it: its finding, the seconds that it took, and the clocks meanwhile."""
        started = time.monotonic()
        clocks: list[Measured]
        with watched_clocks() as clocks:
            finding = self.run()
        seconds = round(time.monotonic() - started, 1)
        return {"name": self.name, **finding._asdict(), "seconds": seconds, "clocks": clocks}


def skipped(name: str, reason: str) -> Section:
    """A section that this machine, or this installation, has nothing for."""
    return Section(name, lambda: Finding("skipped", reason, None))


def command_section(name: str, line: str, flag: str, limit_seconds: float) -> Section:
    """The record that the command ``line`` (a module with its arguments) writes to ``flag``.

    A check that does not hold is a failure with its record; a model that does not fit is skipped.
    """
    return Section(name, lambda: _run_command(line.split(), flag, limit_seconds))


def _run_command(words: list[str], flag: str, limit_seconds: float) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "record.json"
        arguments = [*words, flag, str(written)]
        code = (
            f"import runpy; sys.argv = {arguments!r}; "
            f"runpy.run_module({words[0]!r}, run_name='__main__', alter_sys=True)"
        )
        log = Path(folder) / "log"
        with log.open("w", encoding="utf-8") as file:
            outcome = run_limited(python_command(code), file, limit_seconds, _GRACE_SECONDS)
        if outcome.interrupt is not None:
            raise outcome.interrupt
        said = log.read_text(encoding="utf-8", errors="replace")
        record = _read(written)
    if outcome.exit_code == 0:
        return Finding("done", None, record)
    if outcome.exit_code == TIMED_OUT:
        return Finding("failed", f"not done within {limit_seconds:g} s", record)
    if outcome.exit_code == 1 and record is not None:
        return Finding("failed", "the check does not hold", record)
    reason = _reason(said, outcome.exit_code)
    return Finding("skipped" if reason.startswith("memory: ") else "failed", reason, record)


def _read(path: Path) -> Any:
    """The content of a record without its provenance; None where nothing was written."""
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    result = record.get("result", record)
    return {key: value for key, value in result.items() if key not in _PROVENANCE}


def _reason(said: str, exit_code: int) -> str:
    errors = _ERROR.findall(said)
    lines = [line.strip() for line in said.split("\n") if line.strip()]
    return (errors or lines or [f"exit code {exit_code}"])[-1][:300]
