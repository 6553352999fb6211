"""How many drafts of the demo's modules are kept, in this engine, on held-out prompts, and what a
token takes with them and without:

python -m dsv4.demo.training.acceptance mtp --json FILE
python -m dsv4.demo.training.acceptance dspark --draft-weights runs/dspark/draft --json FILE
python -m dsv4.demo.training.acceptance dspark --device cuda --ops cuda --json FILE
"""

import argparse
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.draft_flags import draft_tokens
from dsv4.command.flags import OneLineParser, integer
from dsv4.command.output_file import refuse_shared_files
from dsv4.command.program import command, run_program
from dsv4.demo import CHECKPOINT, DRAFTS
from dsv4.demo.training import mixture
from dsv4.encoding import Tokenizer
from dsv4.measure.record_file import parse_recorded, write_record
from dsv4.run_stats import RunStats

# Long prompts would take most of the time.
TASKS = [task for task in mixture.MEASURED_TASKS if task not in ("recall_512", "recall_2000")]
MAX_NEW_TOKENS = 200
SECONDS = ("decode_seconds", "decode_seconds_without_drafts")
SUMMED = ("steps", "tokens", "decode_tokens", "draft_seconds", "verify_seconds", *SECONDS)


def measure(
    draft: Any, folder: Path, config: EngineConfig, limit: int, seed: int
) -> dict[str, Any]:
    """The engine with the module on ``limit`` held-out prompts of each task, greedily: what was
    drafted and kept by position, in all and by task, how many texts are those without drafts, and
    seconds of decoding with and without. ``config``: how to run it, but for the drafts.
    """
    plain = Engine.load(CHECKPOINT, replace(config, draft="off", draft_tokens=None))
    engine = Engine.load(CHECKPOINT, replace(config, draft=draft, draft_weights=folder))
    limit_cpu_threads(engine.config)
    tokenizer = Tokenizer(CHECKPOINT)
    for one in (engine, plain):
        decoded(one, tokenizer.encode("What runs first loads kernels."))
    tasks: dict[str, Any] = {}
    for task in TASKS:
        rng = random.Random(f"{seed}/{task}")
        found: list[dict[str, Any]] = []
        equal = 0
        for _ in range(limit):
            ids = tokenizer.encode(mixture.MEASURED_TASKS[task](rng, True).prompt)
            text, run = decoded(engine, ids)
            plain_text, plain_run = decoded(plain, ids)
            assert run.drafts is not None
            seconds = (run.decode_seconds, plain_run.decode_seconds)
            found.append({**asdict(run.drafts), "decode_tokens": run.decode_tokens})
            found[-1].update(zip(SECONDS, seconds, strict=True))
            equal += text == plain_text
        tasks[task] = {**summed(found), "prompts": limit, "equal_texts": equal}
    return {**summed(list(tasks.values())), "tasks": tasks}


def decoded(engine: Engine, ids: list[int]) -> tuple[list[int], RunStats]:
    """The greedy answer, and how it went."""
    tokens = list(engine.generate(ids, MAX_NEW_TOKENS, SamplingParams(temperature=0)))
    assert engine.last_run is not None
    return tokens, engine.last_run


def summed(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Drafts and what was kept of them, by position; tokens a step; time of a token."""
    most = max(len(count["drafted"]) for count in counts)

    def by_position(key: str) -> list[int]:
        return [sum([*count[key], *[0] * most][place] for count in counts) for place in range(most)]

    total = {key: sum(count[key] for count in counts) for key in SUMMED}
    steps = max(1, total["steps"])
    decoded_tokens = max(1, total["decode_tokens"])
    drafted = by_position("drafted")
    accepted = by_position("accepted")
    return {
        **total,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_step": total["tokens"] / steps,
        "acceptance": [kept / max(1, made) for kept, made in zip(accepted, drafted, strict=True)],
        "draft_us_per_step": 1e6 * total["draft_seconds"] / steps,
        "verify_us_per_step": 1e6 * total["verify_seconds"] / steps,
        "ms_per_token": 1e3 * total[SECONDS[0]] / decoded_tokens,
        "ms_per_token_without_drafts": 1e3 * total[SECONDS[1]] / decoded_tokens,
    }


def table(report: dict[str, Any]) -> str:
    """The shares of kept drafts by task, as a Markdown table."""
    columns = ("task", "tokens a step", "kept, by position", "ms a token", "without", "equal texts")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for task, counts in report["tasks"].items():
        lines.append(
            f"| {task} | {shares(counts)} | {counts['equal_texts']} of {counts['prompts']} |"
        )
    equal = sum(counts["equal_texts"] for counts in report["tasks"].values())
    prompts = sum(counts["prompts"] for counts in report["tasks"].values())
    return "\n".join([*lines, f"| all | {shares(report)} | {equal} of {prompts} |"])


def shares(counts: dict[str, Any]) -> str:
    """Tokens a step, the kept share of every position, ms of a token with drafts and without."""
    kept = ", ".join(f"{100 * share:.1f} %" for share in counts["acceptance"])
    times = (counts["ms_per_token"], counts["ms_per_token_without_drafts"])
    return " | ".join([f"{counts['tokens_per_step']:.2f}", kept, *(f"{ms:.3f}" for ms in times)])


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError`` where ``--json`` is a file of the weights."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("draft", choices=sorted(DRAFTS))
    parser.add_argument("--draft-weights", type=Path, metavar="FOLDER", help="default: the demo's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    ops = "cuda: with captured steps (default: torch)"
    parser.add_argument("--ops", choices=("torch", "cuda"), default="torch", help=ops)
    parser.add_argument("--draft-tokens", type=draft_tokens, help="as of the driver")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--limit", type=integer(1), default=8, help="held-out prompts of a task")
    options = parse_recorded(parser, arguments)
    options.draft_weights = options.draft_weights or DRAFTS[options.draft]
    for weights in (("the demo", CHECKPOINT), ("--draft-weights", options.draft_weights)):
        refuse_shared_files([], [("--json", options.json)], also=weights)
    return options


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 where a text is not the one without drafts."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    graph = "full" if options.ops == "cuda" else None
    config = EngineConfig(
        device=options.device,
        ops=options.ops,
        cuda_graph=graph,
        draft_tokens=options.draft_tokens,
    )
    report = measure(options.draft, options.draft_weights, config, options.limit, options.seed)
    print(table(report))
    write_record(options.json, "dsv4.demo.training.acceptance", arguments, report)
    tasks = report["tasks"].values()
    return 0 if all(counts["equal_texts"] == counts["prompts"] for counts in tasks) else 1


if __name__ == "__main__":
    run_program(main)
