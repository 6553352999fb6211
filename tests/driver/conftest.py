"""A checkpoint of random weights with the demo's tokenizer, and ways to run the driver on it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import single_shot_inference
from dsv4.checkpoint import tiny_config, write_synthetic
from dsv4.demo import CHECKPOINT
from encoding import Tokenizer

DRIVER = Path(single_shot_inference.__file__)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what it says is noise, so tests look at everything but the meaning."""
    folder = tmp_path_factory.mktemp("driver") / "checkpoint"
    vocab_size = Tokenizer(CHECKPOINT).vocab_size
    write_synthetic(
        folder,
        tiny_config(vocab_size=vocab_size, max_position_embeddings=65536),
        "nvfp4-experts",
        seed=0,
    )
    shutil.copy(CHECKPOINT / "tokenizer.json", folder)
    return folder


@pytest.fixture
def broken_copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@dataclass(frozen=True)
class Result:
    """What a run of the driver returned and wrote."""

    code: int
    out: str
    err: str

    def assert_user_error(self, *parts: str) -> None:
        """Exit code 2, nothing on stdout, one line on stderr that holds all of ``parts``."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert [part for part in parts if part not in self.err] == []


@pytest.fixture
def drive(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the driver's ``main`` in this process, on the random checkpoint unless ``--model`` is
    given.
    """

    def run(*arguments: object) -> Result:
        texts = [str(argument) for argument in arguments]
        model = [] if "--model" in texts else ["--model", str(checkpoint)]
        code = single_shot_inference.main([*texts, *model])
        written = capfd.readouterr()
        return Result(code, written.out, written.err)

    return run


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the driver as a process of its own, on the CPU, with pipes; no process outlives its
    test.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def run(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        place = ["--model", checkpoint, "--device", "cpu"]
        command = [sys.executable, DRIVER, *place, *map(str, arguments)]
        # The driver has to flush by itself, whatever this environment says.
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
        }
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=cwd, env=environment)
        )
        return processes[-1]

    yield run
    for process in processes:
        with process:
            process.kill()


def read_json(path: Path) -> dict[str, Any]:
    """The report that a run wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
