"""Loading the engine: its plan where several devices share it, and a progress bar for each part."""

import argparse
import sys
from collections.abc import Callable

from dsv4.command.progress import GIGABYTES, KERNELS, ProgressBar
from dsv4.command.streams import say
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.plan import MemoryPlan


def bars_are_shown(arguments: argparse.Namespace) -> bool:
    """Whether stderr is a terminal whose lines a bar may use."""
    return sys.stderr.isatty() and not (arguments.quiet or arguments.verbose)


def say_plan(arguments: argparse.Namespace, plan: Callable[[], MemoryPlan]) -> None:
    """The memory plan of several devices on stderr, unless ``--quiet``."""
    if arguments.gpus > 1 and not arguments.quiet:
        say(str(plan()))


def load_engine(arguments: argparse.Namespace, config: EngineConfig) -> Engine:
    """The engine of ``--model``. Raises what ``Engine.load`` does."""
    shown = bars_are_shown(arguments)
    with (
        ProgressBar("compile", KERNELS, sys.stderr, shown) as compiling,
        ProgressBar("read   ", GIGABYTES, sys.stderr, shown) as reading,
        ProgressBar("pack   ", GIGABYTES, sys.stderr, shown) as packing,
        ProgressBar("keep   ", GIGABYTES, sys.stderr, shown) as keeping,
    ):
        is_read = False

        def read(done: int, total: int) -> None:
            nonlocal is_read
            reading(done, total)
            is_read = done >= total

        def pack(done: int, total: int) -> None:
            # Both go on at once, and there is one line for them.
            if is_read:
                packing(done, total)

        return Engine.load(
            arguments.model, config, read, compiling=compiling, packing=pack, keeping=keeping
        )
