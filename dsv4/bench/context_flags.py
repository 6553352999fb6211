"""The flags of ``bench context``, and the run that they ask for."""

import argparse
import sys
from typing import Any, get_args

from dsv4.bench.decode_modes import DECODE_MODES
from dsv4.bench.device import need_cuda
from dsv4.checkpoint import Geometry
from dsv4.checkpoint.layouts import Layout
from dsv4.command.flags import add_parallel, flag_name, integer, number
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.limits import MAX_PREFILL_CHUNK

MOST_TOKENS = 1 << 20
# Flags of what runs on devices, with their defaults.
OF_A_RUN = {
    "max_context": MOST_TOKENS,
    "prompt": 1 << 18,
    "positions": (1 << 14, 1 << 16, 1 << 18, 1 << 19, 1_000_000),
    "decode_tokens": 64,
    "modes": ("full",),
}


def add_context_options(context: argparse.ArgumentParser) -> None:
    """Adds them to a parser."""
    add = context.add_argument
    add("--geometry", choices=get_args(Geometry), default="v4-flash")
    add("--format", choices=get_args(Layout), default="nvfp4-experts")
    add("--layers", type=integer(1), help="the first N layers (default: all)")
    add("--gpus", type=integer(1, 8), default=1)
    add_parallel(context)
    add("--prefill-chunk", type=integer(1, MAX_PREFILL_CHUNK), help="(default: by the devices)")
    add("--max-context", type=integer(16, MOST_TOKENS))
    add("--prompt", type=integer(1), help="tokens that are really computed")
    text = "where chunks and tokens are timed behind drawn caches"
    add("--positions", type=integer(1), nargs="+", help=text)
    text = "contexts whose memory is planned, and allocated"
    lengths = [1 << 14, 1 << 16, 1 << 18, MOST_TOKENS]
    add("--lengths", type=integer(16, MOST_TOKENS), nargs="+", default=lengths, help=text)
    add("--decode-tokens", type=integer(2))
    add("--modes", choices=DECODE_MODES, nargs="+")
    add(
        "--plan-only",
        type=number(0, 10**6, low_included=False),
        metavar="GB",
        help="nothing but the plan, for GPUs of this size that need not be there",
    )


def fill_defaults(options: argparse.Namespace) -> None:
    """Fills in the defaults of what runs. Raises ``UserError`` for a flag of that beside
    ``--plan-only``.
    """
    for name, default in OF_A_RUN.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.plan_only is not None:
            flag = flag_name(name)
            raise UserError(f"{flag}: found together with --plan-only, which runs nothing")


def measure_context(options: argparse.Namespace) -> dict[str, Any]:
    """Runs it. Raises ``UserError``."""
    from dsv4.bench.context import ContextRun, bench_context, plan_geometry

    fill_defaults(options)
    engine = EngineConfig(
        device="cuda",
        ops="cuda",
        gpus=options.gpus,
        parallel=options.parallel,
        prefill_chunk=options.prefill_chunk,
        max_context=options.max_context,
    )
    run = ContextRun(
        options.geometry,
        options.format,
        options.layers,
        engine,
        options.prompt,
        tuple(options.positions),
        tuple(options.lengths),
        options.decode_tokens,
        tuple(options.modes),
    )
    if options.plan_only is not None:
        return plan_geometry(run, round(options.plan_only * 10**9))
    need_cuda()
    return bench_context(run, sys.stderr.write)
