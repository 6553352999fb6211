"""``fire_b200_test TEST NAME LOG [TIMEOUT]``: runs a test on the GPU node with a limit that really
kills.

TEST is a test file, a folder or a pytest node (``tests/ops/moe/test_moe_cuda.py::test_x``), or a
module (``dsv4.validate.cosine``), with arguments after it in the same quotes. NAME labels the run;
LOG gets its output; TIMEOUT is in seconds. It runs here, or over ssh where FIRE_B200_HOST names the
node; FIRE_B200_DIR is the checkout there (default: the current folder's path) and FIRE_B200_PYTHON
the interpreter (default: python3 there, this one here).

The exit code is the test's; 124 when the limit ended it, 130 on Ctrl-C, SIGTERM or SIGHUP, 2 for
wrong arguments. Nothing that the test started survives it, unless it left the process group on
purpose.
"""

import argparse
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from dsv4.command.flags import OneLineParser
from dsv4.command.output_file import refuse_shared_files
from dsv4.command.program import command, run_program
from dsv4.errors import UserError
from dsv4.limited_process import (
    INTERRUPTED,
    TIMED_OUT,
    Outcome,
    run_limited,
    signals_interrupt,
)

DEFAULT_TIMEOUT_SECONDS = 600.0
GRACE_SECONDS = 10.0
_SSH_FAILED = 255
_KILLED = 128 + signal.SIGKILL
# The time for ssh to connect, in addition to the limit that the node keeps.
_CONNECT_SECONDS = 30.0
_LOG_BEGINNING = "# name: "

# The node's side: $1 seconds of grace, $2 of limit, then the command. timeout leads a process group
# of its own. ssh's end of standard input stays open as long as somebody waits for the result: its
# end means Ctrl-C or a lost connection.
_REMOTE_SCRIPT = """
exec 3<&0
grace=$1; limit=$2; shift 2
timeout --kill-after="$grace" "$limit" "$@" </dev/null 3<&- &
group=$!
{
  cat <&3 >/dev/null; kill -s TERM -- -$group; sleep "$grace"; kill -s KILL -- -$group
} >/dev/null 2>&1 &
watch=$!
wait $group
status=$?
kill -s KILL -- -$group $watch 2>/dev/null
exit $status
"""


@dataclass(frozen=True)
class Node:
    """Where tests run. ``host`` None: on this machine."""

    host: str | None
    folder: str
    python: str

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "Node":
        host = environment.get("FIRE_B200_HOST") or None
        folder = environment.get("FIRE_B200_DIR") or str(Path.cwd())
        python = environment.get("FIRE_B200_PYTHON") or (
            sys.executable if host is None else "python3"
        )
        if host is not None and host.startswith("-"):
            raise UserError(f"FIRE_B200_HOST: found {host!r}, expected a host name")
        return cls(host, folder, python)

    @property
    def name(self) -> str:
        return socket.gethostname() if self.host is None else self.host

    def command(self, test: list[str], limit_seconds: float, grace_seconds: float) -> list[str]:
        """The command on this machine; the node keeps the limit as well when it is another one."""
        if self.host is None:
            return test
        limited = [
            "sh",
            "-c",
            _REMOTE_SCRIPT,
            "sh",
            f"{grace_seconds:g}",
            f"{limit_seconds:g}",
            *test,
        ]
        there = f"cd {shlex.quote(self.folder)} && exec {shlex.join(limited)}"
        return [
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={_CONNECT_SECONDS:.0f}",
            self.host,
            there,
        ]


def command_of(test: str, node: Node) -> list[str]:
    """The command of TEST: pytest for a path, ``python -m`` for a module. Raises ``UserError``."""
    try:
        target, *arguments = shlex.split(test)
    except ValueError:
        raise UserError(
            f"TEST: found {test!r}, expected a test file, a pytest node or a module"
        ) from None
    path = target.partition("::")[0]
    # ``tests`` is a folder, ``dsv4`` a module.
    folder = path != "" and Path(path).is_dir() and not Path(path, "__main__.py").exists()
    if path.endswith(".py") or "/" in path or folder:
        if node.host is None and not Path(path).exists():
            raise UserError(f"TEST: {path}: no such file or folder")
        return [node.python, "-m", "pytest", target, *arguments]
    if not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"TEST: found {target!r}, expected a test file, a pytest node or a module")
    return [node.python, "-m", target, *arguments]


@command
def main(argv: list[str] | None = None, grace_seconds: float = GRACE_SECONDS) -> int:
    """The command; returns the exit code of the test."""
    options = build_parser().parse_args(argv)
    node = Node.of_environment(os.environ)
    limit_seconds = _seconds(options.timeout)
    if not options.name.strip() or not options.name.isprintable():
        raise UserError(f"NAME: found {options.name!r}, expected a label of one line")
    test = command_of(options.test, node)
    try:
        if node.host is None:
            _refuse_tested(options.test, options.log)
        with _open_log(options.log) as log, signals_interrupt():
            outcome = _run_and_log(options.name, node, test, log, limit_seconds, grace_seconds)
    except OSError as error:
        raise UserError(f"LOG: {options.log}: cannot be written ({error.strerror})") from None
    print(f"{options.name}: {_description(outcome, node.host)}, log in {options.log}")
    return outcome.exit_code


def build_parser() -> OneLineParser:
    """The parser of ``fire_b200_test``."""
    parser = OneLineParser(
        prog="fire_b200_test",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "test", metavar="TEST", help="a test file, a pytest node or a module, with its arguments"
    )
    parser.add_argument("name", metavar="NAME", help="a label for the run")
    parser.add_argument("log", metavar="LOG", type=Path, help="the log file, replaced if it exists")
    parser.add_argument(
        "timeout",
        metavar="TIMEOUT",
        nargs="?",
        default=str(DEFAULT_TIMEOUT_SECONDS),
        help="seconds",
    )
    return parser


def _run_and_log(
    name: str, node: Node, test: list[str], log: IO[str], limit_seconds: float, grace_seconds: float
) -> Outcome:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    log.write(
        f"{_LOG_BEGINNING}{name}\n# command: {shlex.join(test)}\n# host: {node.name}\n"
        f"# started: {started}\n\n"
    )
    log.flush()
    command = node.command(test, limit_seconds, grace_seconds)
    if node.host is None:
        outcome = run_limited(command, log, limit_seconds, grace_seconds)
    else:
        # The other node's limit comes first: it ends the test and says how. A pipe is what
        # _REMOTE_SCRIPT watches.
        patience = limit_seconds + grace_seconds + _CONNECT_SECONDS
        outcome = run_limited(command, log, patience, grace_seconds, subprocess.PIPE)
        if outcome.exit_code == _KILLED and outcome.seconds >= limit_seconds:
            # timeout, having sent SIGKILL to its group, is killed by it.
            outcome = Outcome(TIMED_OUT, outcome.seconds)
    log.write(
        f"\n# {_description(outcome, node.host)}\n# exit code: {outcome.exit_code}\n"
        f"# seconds: {outcome.seconds:.1f}\n"
    )
    return outcome


def _description(outcome: Outcome, host: str | None) -> str:
    words = {0: "passed", TIMED_OUT: "timed out", INTERRUPTED: "interrupted"}
    if host is not None:
        words[_SSH_FAILED] = (
            f"failed (exit code {_SSH_FAILED}: ssh to {host} failed or its connection broke)"
        )
    word = words.get(outcome.exit_code, f"failed (exit code {outcome.exit_code})")
    return f"{word} after {outcome.seconds:.1f} s"


def _refuse_tested(test: str, log: Path) -> None:
    """Raises ``UserError`` for a log that would replace what the words of TEST name."""
    words = [Path(word.partition("::")[0]) for word in shlex.split(test)]
    tested = [*words, log] if _is_a_file_of(words, log) else words
    refuse_shared_files([("TEST", path) for path in tested], [("LOG", log)])


def _is_a_file_of(tested: Sequence[Path], log: Path) -> bool:
    """Whether ``log`` is in a folder that is tested, and no log of an earlier run."""
    folders = {path.resolve() for path in tested}
    if not log.is_file() or folders.isdisjoint(log.resolve().parents):
        return False
    with log.open("rb") as file:
        return not file.read(len(_LOG_BEGINNING)).startswith(_LOG_BEGINNING.encode())


def _open_log(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The arguments of the test may be any bytes, which Python holds as lone surrogates.
        return path.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"LOG: {path}: cannot be written ({error.strerror})") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"TIMEOUT: found {text!r}, expected a number of seconds above 0")
    return seconds


def program() -> NoReturn:
    """``main`` as the program of this process."""
    run_program(main)


if __name__ == "__main__":
    program()
