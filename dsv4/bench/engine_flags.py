"""The flags of ``bench engine``, and the run that they ask for."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from dsv4.bench.decode_modes import DECODE_MODES
from dsv4.bench.device import need_cuda
from dsv4.checkpoint import Geometry
from dsv4.checkpoint.layouts import Layout
from dsv4.command.flags import add_parallel, add_prefill_activations, flag_name, integer, number
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.limits import MAX_PREFILL_CHUNK
from dsv4.opened_draft import KIND_OF_FLAG
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
    "draft": None,
    "acceptance": None,
}
OF_MODEL = {"device": "auto", "prompt_tokens": 512, "repeats": 3}


def add_engine_options(engine: argparse.ArgumentParser) -> None:
    """Adds them to a parser."""
    source = engine.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint folder")
    source.add_argument(
        "--geometry", choices=get_args(Geometry), help="random weights of a published geometry"
    )
    engine.add_argument("--gpus", type=integer(1, 8), default=1)
    add_parallel(engine)
    engine.add_argument(
        "--ranks",
        type=int,
        choices=(4, 8),
        help="with --geometry --parallel tensor --gpus 2 or 4: the first of so many ranks, which "
        "exchange as much as all would",
    )
    engine.add_argument(
        "--skew",
        action="store_const",
        const=True,
        help="with --geometry --parallel tensor --gpus 2: how far the ranks are apart at every "
        "exchange of a token, in kernels that note the time",
    )
    chunk = integer(1, MAX_PREFILL_CHUNK)
    engine.add_argument("--prefill-chunk", type=chunk, help="(default: by the devices)")
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
    profile = "where the time of a token goes in split and full"
    engine.add_argument("--profile", action="store_true", help=profile)
    engine.add_argument("--decode-tokens", type=integer(2), default=64)
    device = engine.add_argument("--device", choices=["auto", "cpu", "cuda"])
    device.help = "with --model (default: auto)"
    for flag, default in (("--prompt-tokens", 512), ("--repeats", 3)):
        text = f"with --model (default: {default})"
        engine.add_argument(flag, type=integer(1), help=text)
    _add_geometry_options(engine)


def _add_geometry_options(engine: argparse.ArgumentParser) -> None:
    engine.add_argument(
        "--format", choices=get_args(Layout), help="with --geometry (default: nvfp4-experts)"
    )
    engine.add_argument(
        "--layers", type=integer(1), help="with --geometry: the first N layers (default: all)"
    )
    engine.add_argument(
        "--draft",
        choices=("mtp", "dspark"),
        help="with --geometry: a random draft module, and steps of every length that verify",
    )
    engine.add_argument(
        "--acceptance",
        type=number(0, 1),
        help="with --draft: the share of drafts that is assumed to be kept (default: 0.8)",
    )
    prompts = "with --geometry: lengths to prefill (default: 128 2048 8192)"
    positions = "with --geometry: decode there (default: 1024)"
    engine.add_argument("--prompts", type=integer(1), nargs="+", help=prompts)
    engine.add_argument("--positions", type=integer(1), nargs="+", help=positions)


def fill_defaults(options: argparse.Namespace) -> None:
    """Fills in the defaults of ``bench engine``. Raises ``UserError`` for a flag that means nothing
    with the source or the modes that are given.
    """
    sources = {"--model": OF_MODEL, "--geometry": OF_GEOMETRY}
    source = "--model" if options.geometry is None else "--geometry"
    for other in sources.keys() - {source}:
        for name in sources[other]:
            if getattr(options, name) is not None:
                flag = flag_name(name)
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


def measure_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Runs it. Raises ``UserError`` for flags that do not go together."""
    fill_defaults(options)
    if options.ops == "cutedsl" and options.prefill_activations != "bf16":
        found = f"{options.prefill_activations} with --ops cutedsl"
        raise UserError(f"--prefill-activations: found {found}, expected bf16")
    if options.ranks is not None and (
        options.parallel != "tensor" or options.gpus not in (2, options.ranks // 2)
    ):
        found = f"{options.ranks} with --parallel {options.parallel} --gpus {options.gpus}"
        gpus = "2 or 4" if options.ranks == 8 else "2"
        raise UserError(f"--ranks: found {found}, expected --parallel tensor --gpus {gpus}")
    if options.skew and (options.parallel, options.gpus) != ("tensor", 2):
        found = f"--parallel {options.parallel} --gpus {options.gpus}"
        raise UserError(f"--skew: found {found}, expected --parallel tensor --gpus 2")
    _check_draft(options)
    if options.geometry is not None:
        need_cuda()
    elif options.ops == "cutedsl" and not _is_on_cuda(options.device):
        # The engine knows them as CUDA ops.
        expected = "'torch' or a CUDA device"
        raise UserError(f"--ops: found 'cutedsl' on the CPU, expected {expected}")
    engine = EngineConfig(
        device=options.device or "cuda",
        gpus=options.gpus,
        parallel=options.parallel,
        prefill_chunk=options.prefill_chunk,
        ops="cuda" if options.ops == "cutedsl" else options.ops,
        prefill_activations=options.prefill_activations,
        draft="off",
    )
    check_modes(options, engine)
    if options.geometry is not None:
        return _measure_geometry(options, engine)
    return _measure_checkpoint(options, engine)


def _is_on_cuda(device: str) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _check_draft(options: argparse.Namespace) -> None:
    if options.geometry is None:
        return
    if options.acceptance is not None and options.draft is None:
        raise UserError("--acceptance: found without --draft, expected with it")
    if options.draft is None:
        return
    if options.parallel == "round-robin":
        found = "--parallel round-robin"
        raise UserError(f"--draft: found with {found}, expected pipeline or tensor")
    if options.ranks is not None:
        raise UserError(
            "--draft: found with --ranks, expected all ranks: each accepts its own drafts"
        )
    if options.modes not in (None, ["full"]):
        found = " ".join(options.modes)
        raise UserError(f"--draft: found with --modes {found}, expected full alone")


def _measure_geometry(options: argparse.Namespace, engine: EngineConfig) -> dict[str, Any]:
    from dsv4.bench.drafts import DraftRun
    from dsv4.bench.geometry import GeometryRun, bench_geometry

    modes = None if options.modes is None else tuple(options.modes)
    draft = None
    if options.draft is not None:
        acceptance = 0.8 if options.acceptance is None else options.acceptance
        draft = DraftRun(KIND_OF_FLAG[options.draft], acceptance)
        # Eager steps draft as well: what is measured without drafts is replayed.
        modes = ("full",)
        engine = replace(engine, draft=options.draft, draft_tokens="auto")

    run = GeometryRun(
        options.geometry,
        options.format,
        options.layers,
        engine,
        tuple(options.prompts),
        tuple(options.positions),
        options.decode_tokens,
        modes,
        options.profile,
        op_table("cutedsl") if options.ops == "cutedsl" else None,
        options.ranks,
        bool(options.skew),
        draft,
    )
    run.check_lengths()
    return bench_geometry(run, sys.stderr.write)


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
    run.check_model()
    # Processes of their own come first: later this one holds the devices' memory.
    first_token = bench_first_token(run)
    return bench_checkpoint(run, sys.stderr.write) | first_token
