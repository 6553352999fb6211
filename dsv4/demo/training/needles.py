"""Needle tests of the demo checkpoint: one pair of a long text is asked for, told at a given depth.

``python -m dsv4.demo.training.needles [--lengths N ...] [--depths D ...] [--each N]`` decodes
greedily and prints how many answers are exact, by the length of the prompt and the depth. Prompts
longer than the checkpoint's limit run on a copy of it with a higher one; its rotary frequencies are
made for 2^20 tokens and stay as they are.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4 import EngineConfig
from dsv4.command.flags import OneLineParser, integer, number
from dsv4.command.program import command, run_program
from dsv4.demo import CHECKPOINT
from dsv4.demo.training.evaluate import Evaluator
from dsv4.demo.training.recall import needle
from dsv4.measure.record_file import parse_recorded, write_record

# What is longest of an answer, with room.
ANSWER_TOKENS = 24
PAIRS = 8


@dataclass
class Cell:
    """Exact answers of ``examples`` at one length and depth; ``longest_prompt`` in tokens."""

    length: int
    depth: float
    examples: int = 0
    exact: int = 0
    longest_prompt: int = 0
    seconds: float = 0.0


def longer_copy(checkpoint: Path, tokens: int, folder: Path) -> Path:
    """A copy of a checkpoint in ``folder`` whose config allows ``tokens`` tokens."""
    copy = folder / "checkpoint"
    shutil.copytree(checkpoint, copy)
    config = copy / "config.json"
    raw = json.loads(config.read_text(encoding="utf-8"))
    raw["max_position_embeddings"] = max(tokens, raw["max_position_embeddings"])
    config.write_text(json.dumps(raw), encoding="utf-8")
    return copy


def measure(evaluator: Evaluator, cell: Cell, each: int, seed: int) -> None:
    """Asks for ``each`` needles of the cell; wrong answers go to stderr."""
    rng = random.Random(f"{seed}/{cell.length}/{cell.depth}")
    started = time.perf_counter()
    for _ in range(each):
        example = needle(rng, cell.length, cell.depth, PAIRS)
        found, _, tokens = evaluator.complete(example.prompt, ANSWER_TOKENS)
        cell.examples += 1
        cell.exact += found == example.answer
        cell.longest_prompt = max(cell.longest_prompt, tokens)
        if found != example.answer:
            sys.stderr.write(
                f"{tokens} tokens, depth {cell.depth}: found {found!r}, "
                f"expected {example.answer!r}\n"
            )
    cell.seconds = round(time.perf_counter() - started, 2)


def table(cells: list[Cell]) -> str:
    """The exact answers as a Markdown table: a row for every length, a column for every depth."""
    depths = sorted({cell.depth for cell in cells})
    lines = [
        "| tokens | " + " | ".join(f"depth {depth:g}" for depth in depths) + " |",
        "|---" * (len(depths) + 1) + "|",
    ]
    for length in sorted({cell.length for cell in cells}):
        row = {cell.depth: cell for cell in cells if cell.length == length}
        shares = [f"{row[depth].exact} of {row[depth].examples}" for depth in depths]
        lines.append(f"| {length:,} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for a file that cannot be written."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.needles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lengths", type=integer(128, 1 << 20), nargs="+", default=[2048, 4096, 8192, 16384])
    add("--depths", type=number(0.0, 1.0), nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    add("--each", type=integer(1), default=4, help="needles of each length and depth")
    add("--model", type=Path, default=CHECKPOINT)
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--seed", type=integer(0), default=1)
    return parse_recorded(parser, arguments)


@command
def main(argv: list[str] | None = None) -> int:
    """The command."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    room = max(options.lengths) + 64 + ANSWER_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        copy = longer_copy(options.model, room, Path(folder))
        evaluator = Evaluator(copy, EngineConfig(device=options.device, max_context=room))
    cells = [Cell(length, depth) for length in options.lengths for depth in options.depths]
    for cell in cells:
        measure(evaluator, cell, options.each, options.seed)
        sys.stderr.write(f"{cell.length} tokens, depth {cell.depth}: {cell.exact} exact\n")
    print(table(cells))
    found = {"pairs": PAIRS, "needles": [asdict(cell) for cell in cells]}
    write_record(options.json, "dsv4.demo.training.needles", arguments, found)
    return 0


if __name__ == "__main__":
    run_program(main)
