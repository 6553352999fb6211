"""The rule that every command keeps: exit codes of their own, and one line for an error that is not
the program's.
"""

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, ParamSpec

from dsv4.command.errors import device_error_types, device_message, user_message
from dsv4.command.signals import Stopped, StopSignals, stop_code
from dsv4.command.streams import prepare_streams, say, show, silence_stdout
from dsv4.errors import UserError

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_FAULT = 3
EXIT_READER_GONE = 128 + signal.SIGPIPE

_Arguments = ParamSpec("_Arguments")


def command(body: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """The ``main`` of a command: ``body``, which returns 0, or 1 when what it checks does not hold.

    Wrong input, errors of the operating system and of a device are one line on stderr and 2. Ctrl-C
    is 130, SIGTERM 143 and SIGHUP 129, both with a line; a closed pipe is 141. Anything else is a
    fault of the program and raised.
    """

    @functools.wraps(body)
    def main(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
        prepare_streams()
        try:
            code = body(*arguments, **named)
            show()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Stopped) and stop.number != signal.SIGINT:
                say(f"ended by {signal.Signals(stop.number).name}")
            return stop_code(stop)
        except BrokenPipeError:
            silence_stdout()
            return EXIT_READER_GONE
        except (UserError, OSError, FloatingPointError) as error:
            say(f"error: {user_message(error)}")
            return EXIT_USER_ERROR
        except device_error_types() as error:
            message = device_message(error)
            if message is None:
                raise
            say(f"error: {message}")
            return EXIT_USER_ERROR
        return code

    return main


def run_program(main: Callable[[], int]) -> NoReturn:
    """Runs a command as the program of this process: its signals are handled, its result is the
    exit code, 3 with a traceback for a fault of the program.
    """
    ending = _Ending()
    try:
        with ending:
            ending.code = main()
    except KeyboardInterrupt as stop:  # It came between the end of the block and that of signals.
        ending.code = stop_code(stop)
    leave(ending.code)


def leave(exit_code: int) -> NoReturn:
    """Ends the process as it is: torch aborts when Python tries to free the tensors of a device
    that has failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)


class _Ending:
    """Signals arrive as ``Stopped`` inside the block; whatever leaves it becomes the exit code."""

    def __init__(self) -> None:
        self.code = EXIT_FAULT
        self._signals = StopSignals()

    def __enter__(self) -> None:
        self._signals.install()

    def __exit__(
        self, _: type | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        self._signals.over()
        if isinstance(error, KeyboardInterrupt):
            self.code = stop_code(error)
        elif isinstance(error, SystemExit):  # argparse, after --help
            self.code = error.code if isinstance(error.code, int) else EXIT_OK
        elif error is not None:
            traceback.print_exception(error)
        return True
