"""Held-out exact match of the demo checkpoint in this engine.

``python -m dsv4.demo.training.evaluate [--limit N] [--task T]`` decodes greedily from the quantised
file and prints a table. The exit code is 1 when a bar is missed, an answer does not stop by itself,
or the capital of France is not Paris.
"""

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.command.flags import OneLineParser, add_prefill_activations, integer
from dsv4.command.program import command, run_program
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import mixture
from dsv4.demo.training.chat import BOS, EOS, conversation
from dsv4.encoding import Tokenizer
from dsv4.measure.record_file import parse_recorded, write_record

SHORT_BAR = 0.95
OTHER_BARS = {"recall_128": 0.9, "recall_512": 0.9, "recall_2000": 0.8}
MAX_NEW_TOKENS = 200
PARIS_PROMPTS = (
    "The capital of France is",
    BOS + "The capital of France is",
    conversation("capitals", [("What is the capital of France?", "")]).prompt,
)


@dataclass
class TaskResult:
    """Counts of one task; ``stopped`` answers ended with EOS, the others ran into the limit, as
    loops do.
    """

    task: str
    bar: float
    examples: int = 0
    exact: int = 0
    stopped: int = 0
    longest_prompt: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the bar is met and every answer stopped by itself."""
        return self.exact >= self.bar * self.examples and self.stopped == self.examples

    @property
    def verdict(self) -> str:
        """What the table says of the bar."""
        return "met" if self.passed else "MISSED"


class Evaluator:
    """An engine with its tokenizer, asked one prompt at a time."""

    def __init__(self, checkpoint: Path, config: EngineConfig) -> None:
        self.engine = Engine.load(checkpoint, config)
        limit_cpu_threads(self.engine.config)
        self.tokenizer = Tokenizer(checkpoint)

    def complete(self, prompt: str, most_tokens: int = MAX_NEW_TOKENS) -> tuple[str, bool, int]:
        """Greedy completion of a prompt text, whether it stopped by itself, and the prompt's length
        in tokens.
        """
        ids = self.tokenizer.encode(prompt)
        produced = list(self.engine.generate(ids, most_tokens, SamplingParams(temperature=0)))
        run = self.engine.last_run
        assert run is not None
        return self.tokenizer.decode(produced), run.finish_reason == "stop", len(ids)

    def measure(self, task: str, limit: int, seed: int) -> TaskResult:
        """Exact match of the last answer on ``limit`` held-out examples; failures go to stderr."""
        bar = OTHER_BARS.get(task, SHORT_BAR)
        result = TaskResult(task, bar)
        rng = random.Random(f"{seed}/{task}")
        started = time.perf_counter()
        for _ in range(limit):
            example = mixture.MEASURED_TASKS[task](rng, True)
            found, stopped, length = self.complete(example.prompt)
            result.examples += 1
            result.exact += found == example.answer
            result.stopped += stopped
            result.longest_prompt = max(result.longest_prompt, length)
            if found != example.answer:
                sys.stderr.write(
                    f"{task}: {example.prompt[-120:]!r}: found {found!r}, "
                    f"expected {example.answer!r}\n"
                )
        result.seconds = time.perf_counter() - started
        return result


def knows_paris(evaluator: Evaluator) -> bool:
    """Whether every form of the question about France is answered with Paris and ended there."""
    answers = [evaluator.complete(prompt) for prompt in PARIS_PROMPTS]
    return all(
        text.endswith("Paris.") and EOS not in text and stopped for text, stopped, _ in answers
    )


def table(results: list[TaskResult]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| task | exact match | bar | | clean stops | longest prompt | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        share = f"{100 * r.exact / r.examples:.1f} % ({r.exact} of {r.examples})"
        stops = f"{r.stopped} of {r.examples}"
        bar = f"{100 * r.bar:.0f} % | {r.verdict}"
        lines.append(
            f"| {r.task} | {share} | {bar} | {stops} | {r.longest_prompt} | {r.seconds:.0f} |"
        )
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for a file that cannot be written."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limit", type=integer(1), default=100, help="examples of each task")
    parser.add_argument(
        "--task",
        choices=mixture.MEASURED_TASKS,
        action="append",
        help="only this task (repeatable)",
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--ops", choices=["auto", "torch", "cuda"], default="auto")
    add_prefill_activations(parser)
    parser.add_argument("--compute-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--cuda-graph", choices=["split", "full"], help="decode by replaying captured graphs"
    )
    parser.add_argument("--gpus", type=integer(1, 8), default=1)
    parser.add_argument("--seed", type=integer(0), default=1)
    return parse_recorded(parser, arguments)


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a bar is missed."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    config = EngineConfig(
        device=options.device,
        gpus=options.gpus,
        ops=options.ops,
        prefill_activations=options.prefill_activations,
        compute_dtype=options.compute_dtype,
        cuda_graph=options.cuda_graph,
    )
    evaluator = Evaluator(options.model, config)
    results = []
    for task in options.task or mixture.MEASURED_TASKS:
        results.append(evaluator.measure(task, options.limit, options.seed))
        sys.stderr.write(
            f"{task}: {results[-1].exact} of {results[-1].examples}, {results[-1].seconds:.0f} s\n"
        )
    paris = knows_paris(evaluator)
    print(table(results))
    print(f"\nThe capital of France is Paris: {'yes' if paris else 'no'}")
    found = {"paris": paris, "tasks": [asdict(result) for result in results]}
    write_record(options.json, "dsv4.demo.training.evaluate", arguments, found)
    good = all(result.passed for result in results)
    return 0 if paris and good else 1


if __name__ == "__main__":
    run_program(main)
