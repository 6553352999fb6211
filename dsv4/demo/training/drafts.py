"""Trains a draft module of the demo on the frozen base, writes its folder and measures it:

    python -m dsv4.demo.training.drafts mtp --minutes 8 --out runs/mtp
    python -m dsv4.demo.training.drafts dspark --minutes 8 --out runs/dspark

The same command goes on where a run was stopped, up to its minutes. ``OUT/draft`` is the folder for
``--draft-weights`` (or, as ``dsv4/demo/drafts/{mtp,dspark}``, the demo's own), and
``OUT/acceptance.json`` has the share of drafts that the engine kept on held-out prompts.
"""

import argparse
import json
import math
import multiprocessing
import random
import shutil
import sys
import time
from dataclasses import asdict, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.command.flags import OneLineParser, integer, number
from dsv4.command.program import command
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import mixture
from dsv4.demo.training.data import BatchShape
from dsv4.demo.training.draft_trainer import DraftTrainer
from dsv4.demo.training.train import stream
from dsv4.encoding import Tokenizer
from dsv4.opened_draft import KIND_OF_FLAG

SHAPE = BatchShape(512, 48, 0.3)
TINY = BatchShape(256, 4, 0.3)
PEAK_RATE = 1e-3
FINAL_RATE = 2e-5
SAVED_EVERY = 60.0
# Long prompts would take most of the time.
TASKS = [task for task in mixture.MEASURED_TASKS if task not in ("recall_512", "recall_2000")]
MAX_NEW_TOKENS = 200


def rate_at(fraction: float, step: int) -> float:
    """Warm-up over 100 steps, then a cosine over the run."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(fraction, 1.0)))
    return min(1.0, (step + 1) / 100) * (FINAL_RATE + (PEAK_RATE - FINAL_RATE) * cosine)


def train(trainer: DraftTrainer, pool: Pool, args: argparse.Namespace) -> None:
    """Steps until the minutes are over, those of earlier runs included."""
    state = args.out / "state.pt"
    done: dict[str, Any] = trainer.load(state) if state.exists() else {"step": 0, "seconds": 0.0}
    step = done["step"]
    before = done["seconds"]
    begun = time.time()
    saved = begun
    limit = 60 * args.minutes
    shape = TINY if args.tiny else SHAPE
    seconds = before
    # A run that goes on sees other texts.
    for batch in stream(pool, args.seed + 1000 * step, lambda _: shape):
        seconds = before + time.time() - begun
        if seconds >= limit:
            break
        result = trainer.step(batch, rate_at(seconds / limit, step))
        step += 1
        if step in (1, 10) or step % 50 == 0:
            shares = " ".join(f"{100 * share:.1f}" for share in result.accepted.tolist())
            line = f"{seconds:7.1f}s step {step} loss {float(result.loss):.4f} same % {shares}"
            print(line, flush=True)
        if time.time() - saved > SAVED_EVERY:
            saved = time.time()
            trainer.save(state, {"step": step, "seconds": seconds})
    trainer.save(state, {"step": step, "seconds": seconds})


def measure(folder: Path, device: Any, limit: int, seed: int) -> dict[str, Any]:
    """The engine with the module on ``limit`` held-out prompts of each task, greedily: what was
    drafted and kept by position, in all and by task, and how many texts are those without drafts.
    """
    plain_config = EngineConfig(device=device, ops="torch", draft="off")
    config = replace(plain_config, draft="auto", draft_weights=str(folder))
    engine = Engine.load(CHECKPOINT, config)
    plain = Engine.load(CHECKPOINT, plain_config)
    limit_cpu_threads(engine.config)
    tokenizer = Tokenizer(CHECKPOINT)
    tasks: dict[str, Any] = {}
    for task in TASKS:
        rng = random.Random(f"{seed}/{task}")
        found: list[dict[str, Any]] = []
        equal = 0
        for _ in range(limit):
            ids = tokenizer.encode(mixture.MEASURED_TASKS[task](rng, True).prompt)
            greedy = SamplingParams(temperature=0)
            text = list(engine.generate(ids, MAX_NEW_TOKENS, greedy))
            assert engine.last_run is not None
            assert engine.last_run.drafts is not None
            found.append(asdict(engine.last_run.drafts))
            equal += text == list(plain.generate(ids, MAX_NEW_TOKENS, greedy))
        tasks[task] = {**summed(found), "prompts": limit, "equal_texts": equal}
    return {**summed(list(tasks.values())), "tasks": tasks}


def summed(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Drafts and what was kept of them, by position, and tokens a step."""
    most = max(len(count["drafted"]) for count in counts)

    def by_position(key: str) -> list[int]:
        return [sum([*count[key], *[0] * most][place] for count in counts) for place in range(most)]

    steps = sum(count["steps"] for count in counts)
    tokens = sum(count["tokens"] for count in counts)
    drafted = by_position("drafted")
    accepted = by_position("accepted")
    return {
        "steps": steps,
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_step": tokens / max(1, steps),
        "acceptance": [kept / max(1, made) for kept, made in zip(accepted, drafted, strict=True)],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.drafts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("draft", choices=sorted(KIND_OF_FLAG))
    parser.add_argument("--minutes", type=number(0, 10**4), default=8.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument("--workers", type=integer(1), default=13)
    parser.add_argument("--limit", type=integer(1), default=8, help="held-out prompts of a task")
    parser.add_argument("--tiny", action="store_true", help="small batches, for a look on a CPU")
    return parser.parse_args(arguments)


@command
def main(argv: list[str] | None = None) -> int:
    """The command."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        trainer = DraftTrainer(KIND_OF_FLAG[args.draft], args.device, args.device == "cuda")
        train(trainer, pool, args)
    folder = args.out / "draft"
    if folder.exists():
        shutil.rmtree(folder)
    trainer.publish(folder)
    report = measure(folder, args.device, args.limit, args.seed + 1)
    text = json.dumps(report, indent=2)
    (args.out / "acceptance.json").write_text(f"{text}\n", encoding="utf-8")
    shares = ", ".join(f"{100 * share:.1f} %" for share in report["acceptance"])
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size} bytes, {report['tokens_per_step']:.2f} tokens a step, kept {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())  # Not run_program: the workers would inherit its signal handlers.
