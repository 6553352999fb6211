"""``--prompts`` on the nodes of a Ray cluster: an engine on each, answers written here."""

import argparse
import json
import logging
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import ray.data  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults
from dsv4.cli.job import ModelFiles
from dsv4.cli.prompts.prompts_file import PromptLine
from dsv4.cli.prompts.run import answer_line
from dsv4.command.errors import user_message
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError

# A worker that has answered finds its next line there.
_LINES_AHEAD = 2


class Worker:
    """An engine in a process of its own, on some node. What goes wrong with it is part of its
    result, because an error that Ray raises has lost its type.
    """

    def __init__(
        self, arguments: argparse.Namespace, config: EngineConfig, lines: Sequence[PromptLine]
    ) -> None:
        self._plan = partial(Engine.plan, arguments.model, config)
        self._lines = {line.number: line for line in lines}
        self._fault = ""
        try:
            with device_faults(self._plan):
                self._files = ModelFiles.read(arguments.model)
                limit_cpu_threads(self._files.config)
                self._engine = Engine.load(arguments.model, config)
        except (UserError, OSError) as error:
            self._fault = user_message(error)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The answer to the line of this number, as JSON, or a fault."""
        number = int(row["number"])
        answer = ""
        if not self._fault:
            try:
                with device_faults(self._plan):
                    record = answer_line(self._lines[number], self._files, self._engine)
                answer = json.dumps(record)
            except UserError as error:
                self._fault = user_message(error)
        return {"number": number, "answer": answer, "fault": self._fault}


def answers_on_ray(
    arguments: argparse.Namespace, config: EngineConfig, lines: Sequence[PromptLine]
) -> Generator[tuple[PromptLine, dict[str, Any]], None, None]:
    """The lines with their answers (``answer_line``), as they come, each once: Ray gives the line
    of a worker that has died to another one. Raises ``UserError``.
    """
    waiting = {line.number: line for line in lines}
    with connected(), as_user_errors():
        workers = min(arguments.ray or fitting_workers(config), len(lines))
        # One line to a block, so that every answer comes when it is ready.
        rows = [{"number": line.number} for line in lines]
        answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Worker,
            fn_constructor_args=(arguments, config, list(lines)),
            compute=ray.data.ActorPoolStrategy(
                size=workers, max_tasks_in_flight_per_actor=_LINES_AHEAD
            ),
            num_cpus=1,
            num_gpus=gpus_of_worker(config),
        )
        for row in answers.iter_rows():
            if row["fault"]:
                raise UserError(f"--ray: a worker: {row['fault']}")
            line = waiting.pop(row["number"], None)
            if line is not None:
                yield line, json.loads(row["answer"])
    if waiting:
        raise UserError(f"--ray: found no answer to {len(waiting)} lines, expected one to each")


def gpus_of_worker(config: EngineConfig) -> int:
    """GPUs that the engine of a worker takes, none in a cluster without any."""
    on_cpu = config.device == "cpu" or not ray.cluster_resources().get("GPU", 0)
    return 0 if on_cpu else config.gpus


def fitting_workers(config: EngineConfig) -> int:
    """As many workers as the GPUs of the nodes hold, without GPUs one a node."""
    gpus = gpus_of_worker(config)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found = sum(int(node.get("GPU", 0)) // gpus if gpus else 1 for node in nodes)
    if not found:
        raise UserError(f"--ray: found no node with {gpus} GPUs, expected at least one")
    return found


@contextmanager
def connected() -> Iterator[None]:
    """Inside the block there is a cluster: that of RAY_ADDRESS or of ``ray start``, else one of
    this machine. SIGTERM stays the program's.
    """
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    signal.signal(signal.SIGTERM, handler)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def as_user_errors() -> Iterator[None]:
    """What Ray reports as one line."""
    try:
        yield
    except RayError as error:
        raise UserError(f"--ray: {user_message(error)[:300]}") from None
