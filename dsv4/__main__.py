"""``dsv4 COMMAND``, also as ``python -m dsv4``: every command by its name (docs/commands.md)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NoReturn

import dsv4
from dsv4.command.signals import end_at_once
from dsv4.command.streams import prepare_streams, say, silence_stdout
from dsv4.errors import UserError, shorten


@dataclass(frozen=True)
class Command:
    """A command: ``module`` has its ``main``, which gets ``flags`` before those of the user."""

    help: str
    module: str
    flags: tuple[str, ...] = ()


DRIVER = "single_shot_inference"
COMMANDS = {
    "run": Command("answer a prompt, or those of a file: single_shot_inference.py", DRIVER),
    "chat": Command("a conversation: run --interactive", DRIVER, ("--interactive",)),
    "serve": Command("an OpenAI-compatible server for one user", "dsv4.serve.command"),
    "plan": Command("what every device will hold: run --plan", DRIVER, ("--plan",)),
    "validate": Command("checks of a checkpoint or a machine: layers, graphs, GPUs", ""),
    "export": Command("convert a checkpoint to another format", "dsv4.checkpoint.export"),
    "bench": Command("benchmarks of ops, engine, loading and long contexts", "dsv4.bench.__main__"),
}
VALIDATIONS = {
    "cosine": Command(
        "every layer against the torch ops, transformers or a trace", "dsv4.validate.cosine"
    ),
    "layers": Command("one layer after another, alone", "dsv4.validate.layers"),
    "graph_readiness": Command("can a step be captured?", "dsv4.validate.graph_readiness"),
    "exchange": Command("do GPUs exchange words without a fault?", "dsv4.validate.exchange"),
    "blackwell_report": Command(
        "the native kernels on a Blackwell GPU", "dsv4.validate.blackwell_report"
    ),
}
HELP = ("-h", "--help")


def usage(called: str, commands: Mapping[str, Command]) -> str:
    """What ``--help`` prints."""
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {command.help}" for name, command in commands.items()]
    head = [f"usage: {called} COMMAND ...", "", "commands:"]
    return "\n".join([*head, *lines, "", f"{called} COMMAND --help: its flags"])


def choose(
    words: Sequence[str], called: str = "dsv4", commands: Mapping[str, Command] = COMMANDS
) -> Callable[[], int] | str:
    """The command that ``words`` ask for, or the text that they ask for. Raises ``UserError`` for
    an unknown one.
    """
    name, *rest = words or [""]
    if name in HELP:
        return usage(called, commands)
    if name == "--version" and called == "dsv4":
        return f"dsv4 {dsv4.__version__}"
    command = commands.get(name)
    if command is None:
        found = f"the command {shorten(name)}" if name else "no command"
        expected = f"one of {', '.join(commands)}"
        raise UserError(f"{called}: found {found}, expected {expected} (see --help)")
    if not command.module:
        return choose(rest, f"{called} {name}", VALIDATIONS)
    return partial(_run, command.module, [*command.flags, *rest])


def main(words: Sequence[str]) -> int:
    """The command that ``words`` ask for; the text that they ask for goes to stdout. Nothing large
    is imported for a text or a wrong word.
    """
    prepare_streams()
    try:
        chosen = choose(words)
    except UserError as error:
        say(f"error: {error}")
        return 2
    if callable(chosen):
        return chosen()
    try:
        print(chosen, flush=True)
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        silence_stdout()
        say(f"error: stdout: {error.strerror}")
        return 2
    return 0


def program() -> NoReturn:
    """``main`` as the program of this process."""
    end_at_once()
    words = sys.argv[1:]
    if words[:1] and words[0] in COMMANDS:
        from dsv4.command.program import run_program

        run_program(partial(main, words))
    sys.exit(main(words))


def _run(module: str, words: list[str]) -> int:
    return import_module(module).main(words)


if __name__ == "__main__":
    program()
