"""The benchmark command: prints, and writes with ``--out``, one JSON object with its provenance."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

import torch

from dsv4.bench.decode_modes import DECODE_MODES
from dsv4.checkpoint import Geometry, geometry_config
from dsv4.checkpoint.layouts import Layout
from dsv4.command.flags import OneLineParser, add_prefill_activations, integer
from dsv4.command.output_file import check_output, write_output
from dsv4.command.program import command, run_program
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.measure.provenance import provenance
from dsv4.ops.tables import op_table
from dsv4.parallel.devices import engine_devices, table_name

# Flags of one source of the engine's weights, with their defaults.
OF_GEOMETRY = {
    "format": "nvfp4-experts",
    "layers": None,
    "prompts": (128, 2048, 8192),
    "positions": (1024,),
    "ranks": None,
    "skew": None,
}
OF_MODEL = {"device": "auto", "prompt_tokens": 512, "repeats": 3}


def build_parser() -> OneLineParser:
    """The parser of ``python -m dsv4.bench``."""
    parser = OneLineParser(prog="python -m dsv4.bench")
    kinds = parser.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser(
        "engine", help="load, prefill and decode of a checkpoint or of a geometry"
    )
    _add_engine_options(engine)
    ops = kinds.add_parser("ops", help="every op on real shapes, on the current CUDA device")
    ops.add_argument("--only", default="", help="cases whose 'op: name' contains this")
    load = kinds.add_parser("load", help="from files to devices, random weights of a geometry")
    load.add_argument("--geometry", choices=get_args(Geometry), default="v4-flash")
    load.add_argument("--format", choices=get_args(Layout), default="nvfp4-experts")
    load.add_argument("--layers", type=integer(1), default=4, help="the first N layers")
    load.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    load.add_argument("--gpus", type=integer(1, 8), default=1)
    load.add_argument("--parallel", choices=("pipeline", "round-robin"), default="pipeline")
    load.add_argument("--repeats", type=integer(1), default=3)
    for kind in (engine, ops, load):
        kind.add_argument("--out", type=Path, help="write the JSON here as well as to stdout")
    return parser


def _add_engine_options(engine: argparse.ArgumentParser) -> None:
    source = engine.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint folder")
    source.add_argument(
        "--geometry", choices=get_args(Geometry), help="random weights of a published geometry"
    )
    engine.add_argument("--gpus", type=integer(1, 8), default=1)
    parallel = ("pipeline", "round-robin", "tensor")
    engine.add_argument("--parallel", choices=parallel, default="pipeline")
    engine.add_argument(
        "--ranks",
        type=int,
        choices=(4, 8),
        help="with --geometry --parallel tensor --gpus 2: ranks 0 and 1 of so many, which exchange "
        "as much as all would",
    )
    engine.add_argument(
        "--skew",
        action="store_const",
        const=True,
        help="with --geometry --parallel tensor --gpus 2: how far the ranks are apart at every "
        "exchange of a token, in kernels that note the time",
    )
    engine.add_argument("--prefill-chunk", type=integer(1), help="(default: by the devices)")
    engine.add_argument(
        "--ops",
        choices=("auto", "torch", "cuda", "cutedsl"),
        default="auto",
        help="cutedsl: CUDA ops with the prefill products of the CuTe DSL kernel",
    )
    add_prefill_activations(engine)
    engine.add_argument(
        "--modes",
        choices=DECODE_MODES,
        nargs="+",
        help="ways to decode (default: all, and eager alone with the torch ops)",
    )
    engine.add_argument(
        "--profile", action="store_true", help="where the time of a token goes in split and full"
    )
    engine.add_argument("--decode-tokens", type=integer(2), default=64)
    device = engine.add_argument("--device", choices=["auto", "cpu", "cuda"])
    device.help = "with --model (default: auto)"
    for flag, default in (("--prompt-tokens", 512), ("--repeats", 3)):
        text = f"with --model (default: {default})"
        engine.add_argument(flag, type=integer(1), help=text)
    engine.add_argument(
        "--format", choices=get_args(Layout), help="with --geometry (default: nvfp4-experts)"
    )
    engine.add_argument(
        "--layers", type=integer(1), help="with --geometry: the first N layers (default: all)"
    )
    for flag, text in (
        ("--prompts", "with --geometry: lengths to prefill (default: 128 2048 8192)"),
        ("--positions", "with --geometry: decode there (default: 1024)"),
    ):
        engine.add_argument(flag, type=integer(1), nargs="+", help=text)


def settle(options: argparse.Namespace) -> None:
    """Fills in the defaults of ``bench engine``. Raises ``UserError`` for a flag that means nothing
    with the source or the modes that are given.
    """
    sources = {"--model": OF_MODEL, "--geometry": OF_GEOMETRY}
    source = "--model" if options.geometry is None else "--geometry"
    for other in sources.keys() - {source}:
        for name in sources[other]:
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag}: found with {source}, expected only with {other}")
    for name, default in sources[source].items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def check_modes(options: argparse.Namespace, engine: EngineConfig) -> None:
    """Raises ``UserError`` for modes, and a profile of them, where nothing can be captured."""
    captured = [mode for mode in options.modes or () if mode != "eager"]
    if table_name(engine, engine_devices(engine)) == "torch":
        if captured:
            raise UserError(f"--modes: found {captured[0]!r} with the torch ops, expected 'eager'")
        if options.profile:
            raise UserError("--profile: found with the torch ops, which are not captured")
    if options.profile and options.modes is not None and not captured:
        raise UserError("--profile: found with --modes eager, expected split or full among them")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen benchmark. Raises ``UserError``."""
    # The benchmarks are imported when chosen: those of CUDA kernels need cuda-core.
    if options.kind == "ops":
        from dsv4.bench.ops import bench_ops

        _need_cuda()
        return bench_ops(options.only, lambda line: print(line, file=sys.stderr, flush=True))
    if options.kind == "load":
        from dsv4.bench.load import bench_load

        config = geometry_config(options.geometry, options.layers)
        engine = EngineConfig(device=options.device, gpus=options.gpus, parallel=options.parallel)
        return bench_load(config, options.format, engine, options.repeats)
    settle(options)
    if options.ops == "cutedsl" and options.prefill_activations != "bf16":
        found = f"{options.prefill_activations} with --ops cutedsl"
        raise UserError(f"--prefill-activations: found {found}, expected bf16")
    if options.ranks is not None and (options.parallel, options.gpus) != ("tensor", 2):
        found = f"{options.ranks} with --parallel {options.parallel} --gpus {options.gpus}"
        raise UserError(f"--ranks: found {found}, expected --parallel tensor --gpus 2")
    if options.skew and (options.parallel, options.gpus) != ("tensor", 2):
        found = f"--parallel {options.parallel} --gpus {options.gpus}"
        raise UserError(f"--skew: found {found}, expected --parallel tensor --gpus 2")
    if options.geometry is not None:
        _need_cuda()
    engine = EngineConfig(
        device=options.device or "cuda",
        gpus=options.gpus,
        parallel=options.parallel,
        prefill_chunk=options.prefill_chunk,
        ops="cuda" if options.ops == "cutedsl" else options.ops,
        prefill_activations=options.prefill_activations,
    )
    check_modes(options, engine)
    if options.geometry is not None:
        return _measure_geometry(options, engine)
    return _measure_checkpoint(options, engine)


def _measure_geometry(options: argparse.Namespace, engine: EngineConfig) -> dict[str, Any]:
    from dsv4.bench.geometry import GeometryRun, bench_geometry

    return bench_geometry(
        GeometryRun(
            options.geometry,
            options.format,
            options.layers,
            engine,
            tuple(options.prompts),
            tuple(options.positions),
            options.decode_tokens,
            None if options.modes is None else tuple(options.modes),
            options.profile,
            op_table("cutedsl") if options.ops == "cutedsl" else None,
            options.ranks,
            bool(options.skew),
        ),
        sys.stderr.write,
    )


def _measure_checkpoint(options: argparse.Namespace, engine: EngineConfig) -> dict[str, Any]:
    from dsv4.bench.checkpoint import CheckpointRun, bench_checkpoint, bench_first_token

    run = CheckpointRun(
        options.model,
        engine,
        options.prompt_tokens,
        options.decode_tokens,
        options.repeats,
        None if options.modes is None else tuple(options.modes),
        options.profile,
        op_table("cutedsl") if options.ops == "cutedsl" else None,
    )
    # Processes of their own come first: later this one holds the devices' memory.
    first_token = bench_first_token(run)
    return bench_checkpoint(run, sys.stderr.write) | first_token


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs a CUDA device, found none")


@command
def main(argv: list[str] | None = None) -> int:
    """The command."""
    arguments = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(arguments)
    if options.out is not None:
        check_output("--out", options.out)
    result = measure(options)
    called = " ".join(["python -m dsv4.bench", *arguments])
    text = json.dumps({**provenance(called), "result": result}, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        write_output("--out", options.out, text)
    return 0


if __name__ == "__main__":
    run_program(main)
