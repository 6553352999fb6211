"""What quantised activations do to the demo checkpoint.

``python -m dsv4.demo.training.activation_modes [--limit N] [--task T]`` reads held-out prompts with
their answers in one prefill, in every mode of ``--prefill-activations``, and prints a table: loss
of the answers, and how far streams and logits agree with 16-bit activations. The exit code is 1
when the loss is 0.001 nats higher than theirs, or the cosine of the logits under its bar.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.command.flags import OneLineParser, integer
from dsv4.command.program import command, run_program
from dsv4.config import layer_kinds
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import mixture
from dsv4.encoding import Tokenizer
from dsv4.engine_config import ACTIVATION_MODES, ActivationMode
from dsv4.measure.record_file import parse_recorded, write_record
from dsv4.validate.agreement import Agreement, RowComparison
from dsv4.validate.traces import Trace, block_trace

COSINE_BARS: Mapping[ActivationMode, float] = {"bf16": 1.0, "fp8": 0.999, "nvfp4": 0.997}
# Nats per answer token: 5 % of the loss that the demo had before it knew every answer.
LOSS_MARGIN = 0.001
# Long prompts would take most of the time.
TASKS = [task for task in mixture.MEASURED_TASKS if task not in ("recall_512", "recall_2000")]
# Tokens are not held to it one by one.
_NO_THRESHOLD = -1.0


@dataclass
class ModeResult:
    """One mode over all examples. ``nats``: negative log-likelihood of the answers, summed;
    ``exact``: answers of which every token was the most likely one; ``same_argmax``: tokens, those
    of prompts included, with the most likely next one of 16-bit activations.
    """

    mode: ActivationMode
    kinds: Sequence[str]
    examples: int = 0
    exact: int = 0
    answer_tokens: int = 0
    nats: float = 0.0
    tokens: int = 0
    same_argmax: int = 0
    comparisons: list[RowComparison] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comparisons = [RowComparison(_NO_THRESHOLD) for _ in (*self.kinds, "final", "logits")]

    def add(self, found: Trace, reference: Trace, answer_A: Tensor) -> None:
        """The values of a prompt and its answer, token ids int64 ``[A]``."""
        answer_AV = found["logits"].float()[-len(answer_A) - 1 : -1]
        self.examples += 1
        self.exact += bool((answer_AV.argmax(-1) == answer_A).all())
        self.answer_tokens += len(answer_A)
        self.nats += float(torch.nn.functional.cross_entropy(answer_AV, answer_A, reduction="sum"))
        same = found["logits"].argmax(-1) == reference["logits"].argmax(-1)
        self.tokens += len(same)
        self.same_argmax += int(same.sum())
        for comparison, value, other in zip(
            self.comparisons, _values(found), _values(reference), strict=True
        ):
            comparison.add(value, other)

    @property
    def loss(self) -> float:
        """Nats per answer token."""
        return self.nats / self.answer_tokens

    @property
    def rows(self) -> list[Agreement]:
        """Streams behind every layer, the final hidden state, the logits."""
        names = [f"layer {index}" for index in range(len(self.kinds))]
        kinds = zip([*names, "final", "logits"], [*self.kinds, "", ""], strict=True)
        return [
            comparison.result(name, kind)
            for comparison, (name, kind) in zip(self.comparisons, kinds, strict=True)
        ]

    def passes(self, reference: "ModeResult") -> bool:
        """Whether loss and cosine of the logits are within their bars."""
        cosine = self.rows[-1].cosine
        # The cosine of equal values is 1 but for the rounding of sums.
        near = self.loss <= reference.loss + LOSS_MARGIN
        return near and cosine >= COSINE_BARS[self.mode] - 1e-12

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        counts = {
            name: getattr(self, name)
            for name in ("mode", "examples", "exact", "answer_tokens", "tokens", "same_argmax")
        }
        rows = [asdict(row) for row in self.rows]
        return {**counts, "nats_per_answer_token": self.loss, "rows": rows}


def measure(
    checkpoint: Path, config: EngineConfig, tasks: Iterable[str], limit: int, seed: int
) -> list[ModeResult]:
    """All modes on ``limit`` held-out examples of each task, of engines that are otherwise alike.

    Raises ``UserError`` where ``config`` cannot have quantised activations.
    """
    engines: dict[ActivationMode, Engine] = {
        mode: Engine.load(checkpoint, replace(config, prefill_activations=mode))
        for mode in ACTIVATION_MODES
    }
    limit_cpu_threads(engines["bf16"].config)
    tokenizer = Tokenizer(checkpoint)
    results = [ModeResult(mode, layer_kinds(engine.config)) for mode, engine in engines.items()]
    for task in tasks:
        rng = random.Random(f"{seed}/{task}")
        for _ in range(limit):
            example = mixture.MEASURED_TASKS[task](rng, True)
            prompt = tokenizer.encode(example.prompt)
            answer = tokenizer.encode(example.answer)
            traces = {
                mode: block_trace(engine, prompt + answer) for mode, engine in engines.items()
            }
            for result in results:
                result.add(traces[result.mode], traces["bf16"], torch.tensor(answer))
    return results


def table(results: Sequence[ModeResult]) -> str:
    """One line per mode."""
    names = [row.name for row in results[0].rows]
    lines = [
        f"| mode | nats per answer token | exact | same argmax | {' | '.join(names)} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for r in results:
        cosines = " | ".join(f"{row.cosine:.5f}" for row in r.rows)
        shares = f"{r.exact} of {r.examples} | {r.same_argmax} of {r.tokens}"
        lines.append(f"| {r.mode} | {r.loss:.4f} | {shares} | {cosines} |")
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for a file that cannot be written."""
    parser = OneLineParser(
        prog="python -m dsv4.demo.training.activation_modes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limit", type=integer(1), default=6, help="examples of each task")
    parser.add_argument(
        "--task", choices=mixture.MEASURED_TASKS, action="append", help="repeatable"
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--ops", choices=["auto", "torch"], default="auto")
    parser.add_argument("--seed", type=integer(0), default=1)
    return parse_recorded(parser, arguments)


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a mode misses a bar."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    config = EngineConfig(device=options.device, ops=options.ops)
    tasks = options.task or TASKS
    results = measure(options.model, config, tasks, options.limit, options.seed)
    print(table(results))
    found = {"tasks": tasks, "modes": [result.record() for result in results]}
    write_record(options.json, "dsv4.demo.training.activation_modes", arguments, found)
    return 0 if all(result.passes(results[0]) for result in results) else 1


def _values(trace: Trace) -> list[Tensor]:
    return [*trace["layers"], trace["final"], trace["logits"]]


if __name__ == "__main__":
    run_program(main)
