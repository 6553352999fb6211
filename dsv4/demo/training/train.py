"""Trains the demo model in phases, each going on from the weights of the one before:

``base``    language modelling with top-k selection off; in long rows the indexer learns as well,
            by its own KL alone
``index``   the indexer alone, by KL towards the attention it should imitate
``finish``  everything with selection on and the shipped file's quantisation in the forward pass
``confirm`` as ``finish``, with many sent messages to confirm: near ones first

The shipped weights came from two runs on one H100 (minutes include a minute or two of compilation
each) and one on an H200 that it shared:

    python -m dsv4.demo.training.train base:8.4 --out runs/base
    python -m dsv4.demo.training.train finish:8.1 --seed 7 --init runs/base --out runs/finish
    python -m dsv4.demo.training.publish runs/finish runs/published
    python -m dsv4.demo.training.train confirm:1.6 --eager --rows 32 --near-share 0.7 --seed 11 \
        --init runs/published --out runs/confirm
    python -m dsv4.demo.training.publish runs/confirm dsv4/demo/checkpoint-new
"""

import argparse
import collections
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from dsv4.command.flags import OneLineParser
from dsv4.command.program import command
from dsv4.demo.training import data, mixture, weights
from dsv4.demo.training.data import BatchShape, Request
from dsv4.demo.training.trainer import PHASES, SHORT, TOKENIZER, Phase, Trainer, shape_at

EVALUATION_ROWS = {
    "recall_near": (512, 64),
    "recall_128": (640, 32),
    "recall_512": (2048, 16),
    "recall_2000": (2560, 16),
}


def rate_at(phase: Phase, fraction: float, step: int) -> float:
    """Warm-up, then a cosine over the phase's time."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))
    return min(1.0, (step + 1) / phase.warm_up) * (
        phase.final_rate + (phase.peak_rate - phase.final_rate) * cosine
    )


def stream(pool: Pool, seed: int, choose: Callable[[int], BatchShape]) -> Iterator[Tensor]:
    """Endless batches, 48 of them in the making; ``choose`` gives the shape of batch ``index`` when
    it is ordered.
    """
    waiting: collections.deque[Any] = collections.deque()
    index = 0
    while True:
        while len(waiting) < 48:
            request = Request(str(TOKENIZER), seed, index, choose(index))
            waiting.append(pool.apply_async(data.training_batch, (request,)))
            index += 1
        yield torch.from_numpy(waiting.popleft().get())


def evaluation_batches(device: str) -> dict[str, Tensor]:
    """Held-out batches of every measured task."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    batches = {}
    for task in mixture.MEASURED_TASKS:
        length, rows = EVALUATION_ROWS.get(task, (512, 128))
        batch = data.evaluation_batch(tokenizer, task, rows, length, seed=1)
        batches[task] = torch.from_numpy(batch).to(device)
    return batches


def run(args: argparse.Namespace, pool: Pool) -> None:
    """Builds the model, then trains phase after phase; saves after every evaluation."""
    torch.set_float32_matmul_precision("high")
    model = weights.load_model(args.init) if args.init else weights.build_model()
    trainer = Trainer(model, args.device, compiled=not args.eager)
    batches = evaluation_batches(args.device)
    for index, text in enumerate(args.phases):
        name, _, minutes = text.partition(":")
        trainer.begin(changed(PHASES[name], args))
        print(f"phase {name}, {minutes} minutes", flush=True)
        run_phase(trainer, pool, batches, float(minutes), args.seed + index, args)
        save(trainer, batches, args.out)
        weights.save_shards(trainer.state(), args.out.with_name(f"{args.out.name}-{name}"))


def changed(phase: Phase, args: argparse.Namespace) -> Phase:
    """The phase with what the flags put in its place."""
    names = ("peak_rate", "sent_share", "near_share")
    return replace(phase, **{n: getattr(args, n) for n in names if getattr(args, n) is not None})


def run_phase(
    trainer: Trainer,
    pool: Pool,
    batches: dict[str, Tensor],
    minutes: float,
    seed: int,
    args: argparse.Namespace,
) -> None:
    """Steps until the phase's minutes are over; rates and texts follow the time that compiling
    leaves of them.
    """
    rng = random.Random(seed)
    start = time.time()
    phase = trainer.phase
    if trainer.compiled:
        for long in (False, True):
            trainer.warm_up(shape_at(phase, 0.0, long, args.rows))
        torch.cuda.synchronize()
    compiled = time.time()
    print(f"{compiled - start:7.1f}s compiled", flush=True)

    def fraction() -> float:
        left = start + 60 * minutes - compiled
        return (time.time() - compiled) / left if left > 0 else 1.0

    def choose(index: int) -> BatchShape:
        if args.tiny:
            return BatchShape(256, 2, 0.5)
        long = fraction() >= phase.long_from and rng.random() < phase.long_share
        return shape_at(phase, fraction(), long, args.rows)

    tokens = 0
    mark = time.time()
    last = time.time()
    for step, batch in enumerate(stream(pool, seed, choose)):
        losses = trainer.step(
            batch.to(trainer.device, non_blocking=True), rate_at(phase, fraction(), step)
        )
        tokens += batch[0].numel()
        if step in (0, 1, 10) or step % 100 == 0:
            values = [round(loss.item(), 4) for loss in losses]
            rate = tokens / (time.time() - mark)
            print(
                f"{time.time() - start:7.1f}s step {step} {tuple(batch.shape)} "
                f"loss {values} {rate:.0f} tok/s",
                flush=True,
            )
            tokens = 0
            mark = time.time()
        if time.time() - last > args.evaluate_every:
            save(trainer, batches, args.out)
            mark = time.time()
            last = mark
            tokens = 0
        if fraction() >= 1:
            return


def save(trainer: Trainer, batches: dict[str, Tensor], out: Path) -> None:
    """Writes the weights and prints the held-out scores."""
    weights.save_shards(trainer.state(), out)
    scores = trainer.evaluate(batches, trainer.phase.options)
    print("  " + " ".join(f"{task} {score:.3f}" for task, score in scores.items()), flush=True)


@command
def main() -> int:
    """Command line: phases with their minutes, folders."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="+", metavar="PHASE:MINUTES")
    parser.add_argument("--init", type=Path, help="run folder or checkpoint to go on from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--rows", type=int, default=SHORT.rows, help="rows of a short batch")
    for name in ("peak_rate", "sent_share", "near_share"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, help="in place of the phase's own")
    parser.add_argument(
        "--eager", action="store_true", help="no compiling, which takes minutes: for short runs"
    )
    parser.add_argument("--evaluate-every", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true", help="small batches, for a look on a CPU")
    args = parser.parse_args()
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        run(args, pool)
    return 0


if __name__ == "__main__":
    sys.exit(main())  # Not run_program: the workers would inherit its signal handlers.
