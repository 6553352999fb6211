"""Trains a draft module of the demo on the frozen base and writes its folder:

    python -m dsv4.demo.training.drafts mtp --minutes 8 --out runs/mtp
    python -m dsv4.demo.training.drafts dspark --minutes 8 --out runs/dspark

The same command goes on where a run was stopped, up to its minutes. ``OUT/draft`` is the folder for
``--draft-weights`` (or, as ``dsv4/demo/drafts/{mtp,dspark}``, the demo's own);
``dsv4.demo.training.acceptance`` measures it.
"""

import argparse
import math
import multiprocessing
import shutil
import sys
import time
from dataclasses import replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from dsv4.command.flags import OneLineParser, integer, number
from dsv4.command.program import command
from dsv4.demo.training.data import BatchShape
from dsv4.demo.training.draft_trainer import DraftTrainer
from dsv4.demo.training.train import stream
from dsv4.engine_config import EngineConfig
from dsv4.opened_draft import KIND_OF_FLAG
from dsv4.parallel.devices import engine_devices

SHAPE = BatchShape(512, 48, 0.3)
TINY = BatchShape(256, 4, 0.3)
PEAK_RATE = 1e-3
FINAL_RATE = 2e-5
SAVED_EVERY = 60.0


def rate_at(peak: float, fraction: float, step: int) -> float:
    """Warm-up over 100 steps, then a cosine over the run."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))
    return min(1.0, (step + 1) / 100) * (FINAL_RATE + (peak - FINAL_RATE) * cosine)


def train(trainer: DraftTrainer, pool: Pool, args: argparse.Namespace) -> None:
    """Steps until the minutes are over, those of earlier runs included."""
    state = args.out / "state.pt"
    done: dict[str, Any] = trainer.load(state) if state.exists() else {"step": 0, "seconds": 0.0}
    step = done["step"]
    before = done["seconds"]
    begun = time.time()
    saved = begun
    limit = 60 * args.minutes
    compiled = 0.0
    shape = replace(TINY if args.tiny else SHAPE, words_share=args.words_share)
    seconds = before
    # A run that goes on sees other texts.
    for batch in stream(pool, args.seed + 1000 * step, lambda _: shape):
        seconds = before + time.time() - begun
        if seconds >= limit:
            break
        rate = rate_at(args.peak_rate, (seconds - compiled) / (limit - compiled), step)
        result = trainer.step(batch, rate)
        step += 1
        if compiled == 0:
            # The rate follows the time that compiling leaves.
            float(result.loss)
            compiled = time.time() - begun
        if step in (1, 10) or step % 50 == 0:
            shares = " ".join(f"{100 * share:.1f}" for share in result.accepted.tolist())
            line = f"{seconds:7.1f}s step {step} loss {float(result.loss):.4f} same % {shares}"
            print(line, flush=True)
        if time.time() - saved > SAVED_EVERY:
            saved = time.time()
            trainer.save(state, {"step": step, "seconds": seconds})
    trainer.save(state, {"step": step, "seconds": seconds})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.drafts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("draft", choices=sorted(KIND_OF_FLAG))
    parser.add_argument("--minutes", type=number(0, 10**4), default=8.0)
    parser.add_argument("--init", type=Path, metavar="FOLDER", help="a module to go on from")
    parser.add_argument("--peak-rate", type=number(0, 1), default=PEAK_RATE)
    words = "of the short documents: that repeat random words, besides the usual ones"
    parser.add_argument("--words-share", type=number(0, 1), default=0.0, help=words)
    parser.add_argument(
        "--eager", action="store_true", help="no compiling, which takes a minute: for short runs"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument("--workers", type=integer(1), default=13)
    parser.add_argument("--tiny", action="store_true", help="small batches, for a look on a CPU")
    return parser.parse_args(arguments)


@command
def main(argv: list[str] | None = None) -> int:
    """The command."""
    args = parse(argv)
    engine_devices(EngineConfig(device=args.device))  # Refuses a GPU that is not there.
    args.out.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        trainer = DraftTrainer(KIND_OF_FLAG[args.draft], args.device, not args.eager)
        if args.init is not None:
            trainer.start_from(args.init)
        train(trainer, pool, args)
    folder = args.out / "draft"
    if folder.exists():
        shutil.rmtree(folder)
    trainer.publish(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())  # Not run_program: the workers would inherit its signal handlers.
