"""``--prompts`` on two workers of a local Ray cluster, in an environment with the extra ``[ray]``,
which ``make test`` does not install: ``python -m pytest tests/driver/test_prompts_on_ray.py``.
"""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsv4.demo import CHECKPOINT
from tests.driver.conftest import DRIVER
from tests.driver.drive import Drive

pytestmark = pytest.mark.slow
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra [ray]")
COUNT = 24


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Questions whose answers take long enough to be interrupted."""
    path = tmp_path / "prompts"
    lines = [
        {"id": f"q{n}", "prompt": f"Tell me a story of {n}.", "max_tokens": 40}
        for n in range(COUNT)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(prompts: Path, out: Path, *flags: object) -> list[str]:
    given = ("--prompts", prompts, "--out", out, "--temperature", 0, "--quiet", *flags)
    return [sys.executable, *map(str, (DRIVER, "--model", CHECKPOINT, *given))]


def answers(path: Path) -> list[str]:
    """The whole lines."""
    return [] if not path.exists() else path.read_text().split("\n")[:-1]


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def workers(driver: int) -> list[int]:
    """Processes of Ray under ``driver`` that answer lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        pid = int(folder.name)
        if title.startswith(b"ray::MapWorker") and driver in ancestors(pid):
            found.append(pid)
    return sorted(found)


def wait_for(answered: int, out: Path, process: subprocess.Popen[bytes]) -> None:
    while len(answers(out)) < answered:
        assert process.poll() is None
        time.sleep(0.1)


@with_ray
def test_a_killed_worker_loses_nothing_and_answers_nothing_twice(
    prompts: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    subprocess.run(command(prompts, alone), check=True)
    out = tmp_path / "out"
    with subprocess.Popen(command(prompts, out, "--ray", 2)) as process:
        try:
            wait_for(3, out, process)
            first, second = workers(process.pid)
            os.kill(first, signal.SIGKILL)
            wait_for(9, out, process)
            os.kill(second, signal.SIGKILL)
            assert process.wait(120) == 0
        finally:
            process.kill()
    assert len(answers(out)) == COUNT
    assert sorted(answers(out)) == sorted(answers(alone))


@with_ray
def test_a_run_that_was_ended_is_resumed(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(command(prompts, out, "--ray", 2)) as process:
        try:
            wait_for(3, out, process)
            began = workers(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    there = answers(out)
    assert 3 <= len(there) < COUNT
    assert len(began) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in began)
    subprocess.run(command(prompts, out, "--ray"), check=True)
    assert answers(out)[: len(there)] == there
    assert len({json.loads(line)["id"] for line in answers(out)}) == COUNT


@with_ray
def test_what_a_worker_cannot_load_is_one_line(prompts: Path, tmp_path: Path) -> None:
    wrong = command(prompts, tmp_path / "out", "--ray", 2, "--device", "cuda")
    result = subprocess.run(wrong, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: --ray: a worker: ")


def test_the_flag_needs_prompts_and_the_library(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive("--ray", "2").assert_user_error("--ray: found without --prompts, expected both")
    monkeypatch.setattr("dsv4.cli.prompts.flags.find_spec", lambda _: None)
    refused = drive("--prompts", "x", "--out", "y", "--ray")
    refused.assert_user_error("--ray: ", "has no ray, expected it: pip install 'dsv4[ray]'")
