"""Clocks, power and temperature of the GPUs while something runs, as nvidia-smi shows them."""

import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUANTITIES = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_SECONDS = 1

Measured = dict[str, dict[str, float]]


@contextmanager
def watched_clocks() -> Iterator[list[Measured]]:
    """Inside the block the GPUs are looked at every second; behind it the list holds, for every
    GPU, the least, median and largest value of each quantity. Empty where there is no nvidia-smi.
    """
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "clocks"
        with log.open("w") as file:
            watcher = _start(file.fileno())
        try:
            yield found
        finally:
            if watcher is not None:
                watcher.terminate()
                watcher.wait()
                found += summaries(log.read_text(encoding="utf-8", errors="replace"))


def _start(output: int) -> subprocess.Popen[bytes] | None:
    query = f"--query-gpu=index,{','.join(QUANTITIES)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop={_SECONDS}"]
    try:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def summaries(lines: str) -> list[Measured]:
    """Of the lines ``index, value, …`` in the order of ``QUANTITIES``; what is no number, or cut
    short, is left out.
    """
    values: dict[int, dict[str, list[float]]] = {}
    for line in lines.split("\n"):
        index, *columns = [column.strip() for column in line.split(",")]
        if not index.isdecimal() or len(columns) != len(QUANTITIES):
            continue
        of_gpu = values.setdefault(int(index), {})
        for name, column in zip(QUANTITIES, columns, strict=True):
            if column.replace(".", "", 1).isdecimal():
                of_gpu.setdefault(name, []).append(float(column))
    return [
        {
            name: {"least": min(seen), "median": statistics.median(seen), "largest": max(seen)}
            for name, seen in values[index].items()
        }
        for index in sorted(values)
    ]
