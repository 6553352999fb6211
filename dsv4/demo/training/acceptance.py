"""How many drafts of the demo's modules are kept, in this engine, on held-out prompts:

python -m dsv4.demo.training.acceptance mtp --json FILE
python -m dsv4.demo.training.acceptance dspark --draft-weights runs/dspark/draft --json FILE
"""

import argparse
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.command.flags import OneLineParser, integer
from dsv4.command.program import command, run_program
from dsv4.demo import CHECKPOINT, DRAFTS
from dsv4.demo.training import mixture
from dsv4.encoding import Tokenizer
from dsv4.measure.record_file import parse_recorded, write_record

# Long prompts would take most of the time.
TASKS = [task for task in mixture.MEASURED_TASKS if task not in ("recall_512", "recall_2000")]
MAX_NEW_TOKENS = 200


def measure(draft: Any, folder: Path, device: Any, limit: int, seed: int) -> dict[str, Any]:
    """The engine with the module on ``limit`` held-out prompts of each task, greedily: what was
    drafted and kept by position, in all and by task, and how many texts are those without drafts.
    """
    plain_config = EngineConfig(device=device, ops="torch", draft="off")
    config = replace(plain_config, draft=draft, draft_weights=str(folder))
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


def table(report: dict[str, Any]) -> str:
    """The shares of kept drafts by task, as a Markdown table."""
    lines = ["| task | tokens a step | kept, by position | equal texts |", "|---|---|---|---|"]
    for task, counts in report["tasks"].items():
        lines.append(
            f"| {task} | {shares(counts)} | {counts['equal_texts']} of {counts['prompts']} |"
        )
    equal = sum(counts["equal_texts"] for counts in report["tasks"].values())
    prompts = sum(counts["prompts"] for counts in report["tasks"].values())
    return "\n".join([*lines, f"| all | {shares(report)} | {equal} of {prompts} |"])


def shares(counts: dict[str, Any]) -> str:
    """Tokens a step, and the kept share of every position."""
    kept = ", ".join(f"{100 * share:.1f} %" for share in counts["acceptance"])
    return f"{counts['tokens_per_step']:.2f} | {kept}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("draft", choices=sorted(DRAFTS))
    parser.add_argument("--draft-weights", type=Path, metavar="FOLDER", help="default: the demo's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--limit", type=integer(1), default=8, help="held-out prompts of a task")
    return parse_recorded(parser, arguments)


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 where a text is not the one without drafts."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    folder = options.draft_weights or DRAFTS[options.draft]
    report = measure(options.draft, folder, options.device, options.limit, options.seed)
    print(table(report))
    write_record(options.json, "dsv4.demo.training.acceptance", arguments, report)
    tasks = report["tasks"].values()
    return 0 if all(counts["equal_texts"] == counts["prompts"] for counts in tasks) else 1


if __name__ == "__main__":
    run_program(main)
