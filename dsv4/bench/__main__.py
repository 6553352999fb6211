"""The benchmark command: prints, and writes with ``--out``, one JSON object with its provenance."""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from dsv4.bench.context_flags import add_context_options, measure_context
from dsv4.bench.device import need_cuda
from dsv4.bench.engine_flags import add_engine_options, measure_engine
from dsv4.checkpoint import Geometry, geometry_config
from dsv4.checkpoint.layouts import Layout
from dsv4.command.flags import OneLineParser, add_parallel, integer
from dsv4.command.output_file import STDOUT, check_output, refuse_shared_files, write_output
from dsv4.command.program import command, run_program
from dsv4.engine_config import EngineConfig
from dsv4.measure.provenance import provenance
from dsv4.measure.record_file import record_text


def build_parser() -> OneLineParser:
    """The parser of ``python -m dsv4.bench``."""
    parser = OneLineParser(prog="python -m dsv4.bench")
    kinds = parser.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser(
        "engine", help="load, prefill and decode of a checkpoint or of a geometry"
    )
    add_engine_options(engine)
    ops = kinds.add_parser("ops", help="every op on real shapes, on the current CUDA device")
    ops.add_argument("--only", default="", help="cases whose 'op: name' contains this")
    load = kinds.add_parser("load", help="from files to devices, random weights of a geometry")
    load.add_argument("--geometry", choices=get_args(Geometry), default="v4-flash")
    load.add_argument("--format", choices=get_args(Layout), default="nvfp4-experts")
    load.add_argument("--layers", type=integer(1), default=4, help="the first N layers")
    load.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    text = "each of these numbers in turn; first tokens by the first alone"
    load.add_argument("--gpus", type=integer(1, 8), nargs="+", default=[1], help=text)
    add_parallel(load)
    load.add_argument("--repeats", type=integer(1), default=3)
    warm = "with the files in the page cache alone"
    load.add_argument("--warm-only", action="store_true", help=warm)
    context = kinds.add_parser("context", help="time and memory by position and length")
    add_context_options(context)
    for kind in (engine, ops, load, context):
        kind.add_argument("--out", type=Path, help="write the JSON here as well as to stdout")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen benchmark. Raises ``UserError``."""
    # The benchmarks are imported when chosen: those of CUDA kernels need cuda-core.
    if options.kind == "ops":
        from dsv4.bench.ops import bench_ops

        need_cuda()
        return bench_ops(options.only, lambda line: print(line, file=sys.stderr, flush=True))
    if options.kind == "load":
        from dsv4.bench.load import bench_load

        config = geometry_config(options.geometry, options.layers)
        engines = [
            EngineConfig(device=options.device, gpus=gpus, parallel=options.parallel)
            for gpus in options.gpus
        ]
        cold = not options.warm_only
        log = sys.stderr.write
        return bench_load(config, options.format, engines, options.repeats, cold, log)
    if options.kind == "context":
        return measure_context(options)
    return measure_engine(options)


@command
def main(argv: list[str] | None = None) -> int:
    """The command."""
    arguments = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(arguments)
    if options.out is not None:
        model = options.model if options.kind == "engine" else None
        refuse_shared_files([], [("--out", options.out)], model)
        check_output("--out", options.out)
    result = measure(options)
    called = " ".join(["python -m dsv4.bench", *arguments])
    text = record_text({**provenance(called), "result": result})
    try:
        if options.out != STDOUT:
            sys.stdout.write(text)
    finally:  # Whoever reads stdout may have left.
        if options.out is not None:
            write_output("--out", options.out, text)
    return 0


if __name__ == "__main__":
    run_program(main)
