"""Is the decode step ready for CUDA graphs? ``python -m dsv4.validate.graph_readiness --help``

First the static scan (``sync_scan``), which needs no GPU; ``--static-only`` ends there. Then, on a
checkpoint, the checks of ``decode_checks``: a step that may not wait for the device, the capture of
every region, replays against eager steps bit by bit, and memory that does not grow. Prints a table,
writes JSON, and ends with exit code 1 when a check fails.
"""

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from dsv4.command.flags import OneLineParser, add_parallel, given_flags, integer
from dsv4.command.output_file import check_output, refuse_shared_files
from dsv4.command.program import command, run_program
from dsv4.decode import CUDAGraphDecoder, Mode
from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig, Parallel
from dsv4.errors import UserError
from dsv4.measure.record_file import write_record
from dsv4.step.steps import RecordedSteps
from dsv4.validate.decode_checks import (
    REPLAYS,
    START,
    STEPS,
    Check,
    EagerRun,
    attempt,
    check_capture,
    check_eager,
    check_memory,
    check_replay,
    check_replay_waits,
    device_memory,
)
from dsv4.validate.sync_scan import scan_tree


def check_sources() -> list[Check]:
    """The static scan: a failed check per finding."""
    name = "static scan"
    passed = Check(name, True, "nothing that makes the host wait in the code of a step")
    return [Check(name, False, str(finding)) for finding in scan_tree()] or [passed]


def check_checkpoint(
    model: Path, modes: list[Mode], gpus: int, parallel: Parallel
) -> tuple[list[Check], dict[str, list[str]]]:
    """The checks that need a GPU, and the captured regions by mode. Raises ``UserError``."""
    if not torch.cuda.is_available():
        raise UserError(
            "graph_readiness: found no CUDA device, expected one; --static-only does without"
        )
    room = START + STEPS + REPLAYS
    config = EngineConfig(
        device="cuda",
        ops="cuda",
        gpus=gpus,
        parallel=parallel,
        max_context=room,
        cuda_graph=None,
        draft="off",
    )
    return check_engine(Engine.load(model, config), modes)


def check_engine(engine: Engine, modes: list[Mode]) -> tuple[list[Check], dict[str, list[str]]]:
    """The same of an engine without a decoder, with room for all steps.

    Raises ``UserError`` for one with the torch ops.
    """
    runs: list[EagerRun] = []

    def steps() -> str:
        runs.append(EagerRun.of(engine))
        return f"{STEPS} steps from position {START}"

    checks = [attempt("eager steps", steps)]
    regions = {}
    if not runs:
        return checks, regions
    recorded = engine.steps
    if not isinstance(recorded, RecordedSteps):
        raise UserError("graph_readiness: found the torch ops, expected 'cuda'")
    checks.append(check_eager(engine, recorded, runs[0]))
    for mode in modes:
        engine.reset()
        make = partial(CUDAGraphDecoder, recorded, mode, engine.max_context)
        check, decoder = check_capture(mode, engine, make)
        checks.append(check)
        regions[mode] = [] if decoder is None else [*decoder.regions]
        if decoder is not None and check.passed:
            checks += [
                check_replay(mode, engine, decoder, runs[0]),
                check_replay_waits(mode, engine, decoder, runs[0]),
                check_memory(mode, engine, decoder, runs[0], lambda: device_memory(engine.state)),
            ]
    return checks, regions


def table(checks: list[Check]) -> str:
    """The rows as text."""
    width = max(len(check.name) for check in checks)
    return "\n".join(
        f"{'passed' if check.passed else 'FAILED'}  {check.name:<{width}}  {check.detail}"
        for check in checks
    )


def build_parser() -> OneLineParser:
    """The parser of ``python -m dsv4.validate.graph_readiness``."""
    parser = OneLineParser(prog="python -m dsv4.validate.graph_readiness", description=__doc__)
    parser.add_argument(
        "--static-only", action="store_true", help="only the scan of the sources; needs no GPU"
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint folder")
    parser.add_argument("--gpus", type=integer(1, 8), default=1)
    add_parallel(parser)
    parser.add_argument(
        "--mode", choices=get_args(Mode), action="append", help="repeatable (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write the checks and where they come from")
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for a combination that would be ignored and for a file
    that cannot be written.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    unused = given_flags(parser, options) & {"model", "gpus", "parallel", "mode"}
    if options.static_only and unused:
        raise UserError(f"--{min(unused)}: found together with --static-only, which loads no model")
    if options.json is not None:
        refuse_shared_files([], [("--json", options.json)], options.model)
        check_output("--json", options.json)
    return options


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a check fails."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    checks = check_sources()
    regions = {}
    if not options.static_only:
        found, regions = check_checkpoint(
            options.model, options.mode or [*get_args(Mode)], options.gpus, options.parallel
        )
        checks += found
    print(table(checks))
    record = {
        "model": str(options.model),
        "regions": regions,
        "checks": [asdict(check) for check in checks],
    }
    write_record(options.json, "dsv4.validate.graph_readiness", arguments, record)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    run_program(main)
