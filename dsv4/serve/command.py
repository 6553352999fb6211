"""``dsv4 serve``: loads the engine and serves it until a signal comes."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.cli.arguments import engine_config
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults
from dsv4.cli.generation_defaults import check_defaults
from dsv4.cli.job import ModelFiles
from dsv4.cli.load import load_engine, say_plan
from dsv4.cli.log_lines import log_lines
from dsv4.command.program import EXIT_OK, command, run_program
from dsv4.command.streams import say
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.model_files import files_of_model
from dsv4.serve.flags import parse_arguments

if TYPE_CHECKING:
    from dsv4.serve.service import Service
    from dsv4.serve.worker import Worker

LIBRARIES = ("uvicorn", "starlette", "pydantic")


def check_installed() -> None:
    """Raises ``UserError`` without the libraries of the extra ``serve``."""
    for library in LIBRARIES:
        if find_spec(library) is None:
            advice = "expected the extra serve: pip install 'dsv4[serve]'"
            raise UserError(f"dsv4 serve: found no {library}, {advice}")


def load(arguments: argparse.Namespace, config: ModelConfig) -> Engine:
    """The engine. Raises what ``Engine.load`` does."""
    limit_cpu_threads(config)
    return load_engine(arguments, engine_config(arguments))


def build_service(
    arguments: argparse.Namespace, files: ModelFiles, engine: Engine, worker: "Worker"
) -> "Service":
    """What requests need, around an engine that ``worker`` has loaded. Raises ``UserError``."""
    from dsv4.serve.answering import Answering
    from dsv4.serve.sequences import SavedSequences
    from dsv4.serve.service import Service

    folder: Path = arguments.model
    sequences = SavedSequences(engine, arguments.state_dir, arguments.states)
    return Service(
        model_name=arguments.model_name or folder.resolve().name,
        folder=folder,
        files=files,
        max_context=engine.max_context,
        thinks=arguments.thinking == "on",
        most_body_bytes=arguments.max_body * 10**6,
        worker=worker,
        answering=Answering(engine, files.tokenizer, sequences),
        created=int(time.time()),
    )


def make_state_folder(folder: Path) -> None:
    """Makes the folder of ``--state-dir``. Raises ``UserError`` where no state can be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--state-dir: {folder}: found a file, expected a folder") from None
    except OSError as error:
        raise UserError(f"--state-dir: {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        found = "found a folder that cannot be read and written, expected one that can"
        raise UserError(f"--state-dir: {folder}: {found}")
    for file in files_of_model(folder):
        if file.exists():
            found = f"found {file.name}, a model's, expected a folder for states alone"
            raise UserError(f"--state-dir: {folder}: {found}")


def serve(arguments: argparse.Namespace) -> int:
    """The whole job; returns the exit code. Raises ``UserError``, for the files of the model before
    anything is loaded.
    """
    from dsv4.serve.server import Server, open_socket, read_api_key, url_of
    from dsv4.serve.worker import Worker

    key = None if arguments.api_key_file is None else read_api_key(arguments.api_key_file)
    files = ModelFiles.read(arguments.model)
    check_defaults(files.config, files.generation)
    if arguments.state_dir is not None:
        make_state_folder(arguments.state_dir)
    plan = partial(Engine.plan, arguments.model, engine_config(arguments))
    with (
        open_socket(arguments.host, arguments.port, key is not None) as bound,
        device_faults(plan),
    ):
        say_plan(arguments, plan)
        worker = Worker(arguments.queue)
        engine = worker.call(partial(load, arguments, files.config))
        service = build_service(arguments, files, engine, worker)
        context = f"{service.max_context:,} tokens"
        line = f"serving {service.model_name} at {url_of(bound)}, context {context}; Ctrl-C ends it"
        server = Server(service, key, line)
        # From the first signal on another one is the same wish, also between the end of the serving
        # and the writing of the state, which it does not end.
        with server.capture_signals():
            server.run([bound])
            if service.fault is not None:
                raise service.fault
            worker.call(service.answering.keep_sequence)
            say(service.tally.line())
    return EXIT_OK if server.stopped_by is None else 128 + server.stopped_by


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command; docs/commands.md has its exit codes."""
    arguments = parse_arguments(argv)
    check_installed()
    with log_lines(sys.stderr, arguments.verbose):
        return serve(arguments)


if __name__ == "__main__":
    run_program(main)
