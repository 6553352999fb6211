"""Per-layer cosine of the engine against the torch ops, transformers or anybody's trace files:
``python -m dsv4.validate.cosine --help``.

Prints a table, writes JSON and an SVG plot, and ends with exit code 1 when a token is under the
threshold. ``--swap op=torch`` takes one op from the torch table, which is how a fault is traced to
its op; ``--chunk 1`` feeds token by token and so compares the decode kernels, a larger chunk the
prefill kernels.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4.cli.flags import DEFAULT_PROMPT
from dsv4.cli.prompt import check_unicode, load_tokenizer
from dsv4.command.flags import (
    OneLineParser,
    add_parallel,
    add_prefill_activations,
    given_flags,
    integer,
    number,
)
from dsv4.command.output_file import write_output
from dsv4.command.program import command, run_program
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.limits import MAX_PREFILL_CHUNK
from dsv4.measure.record_file import write_record
from dsv4.validate.against import compare_files
from dsv4.validate.agreement import DEFAULT_THRESHOLD, Agreement, agreement, table
from dsv4.validate.names import column_of
from dsv4.validate.plot import Point, cosine_svg
from dsv4.validate.reference_flags import (
    DEFAULT_CHUNK,
    check_outputs,
    check_reference_device,
    parse_swaps,
)
from dsv4.validate.traces import Trace, engine_trace, transformers_trace, write_engine_trace


class Report(NamedTuple):
    """What a comparison prints, writes as JSON and plots, and whether all of it agrees."""

    text: str
    facts: dict[str, Any]
    points: list[Point]
    passes: bool


def compare(
    found: Trace, reference: Trace, kinds: list[str], threshold: float = DEFAULT_THRESHOLD
) -> list[Agreement]:
    """One row per layer (streams after it), then the final hidden state and the logits."""
    rows = [
        agreement(f"layer {index}", kind, a, b, threshold)
        for index, (kind, a, b) in enumerate(
            zip(kinds, found["layers"], reference["layers"], strict=True)
        )
    ]
    return rows + [
        agreement(name, "", found[name], reference[name], threshold) for name in ("final", "logits")
    ]


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m dsv4.validate.cosine``."""
    parser = OneLineParser(prog="python -m dsv4.validate.cosine", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint folder")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="plain text that both sides read")
    parser.add_argument(
        "--random-tokens",
        type=integer(1),
        metavar="N",
        help="N random token ids instead of a prompt",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--gpus", type=integer(1, 8), default=1, help="of our side")
    add_parallel(parser)
    parser.add_argument("--ops", choices=("auto", "torch", "cuda"), default="auto")
    parser.add_argument(
        "--chunk",
        type=integer(1, MAX_PREFILL_CHUNK),
        default=DEFAULT_CHUNK,
        help="tokens per forward; up to 8: decode kernels",
    )
    parser.add_argument(
        "--cuda-graph", choices=("split", "full"), help="replayed steps, token by token"
    )
    parser.add_argument(
        "--swap", action="append", default=[], metavar="OP=TABLE", help="e.g. moe=torch; repeatable"
    )
    parser.add_argument(
        "--reference",
        choices=("torch", "transformers"),
        default="torch",
        help="the other side; transformers computes in float32 and quantises no cache",
    )
    parser.add_argument("--reference-device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--kv-dtype", choices=("fp8", "bf16"), default="fp8", help="also of --reference torch"
    )
    parser.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_prefill_activations(parser)
    parser.add_argument(
        "--threshold",
        type=number(-1, 1),
        default=DEFAULT_THRESHOLD,
        help="of every token: its cosine, or the share of its experts or entries that agree",
    )
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="somebody's trace (docs/traces.md), or those of all its ranks, instead of a reference",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="ours, for --against; without it the engine runs on the tokens of their file",
    )
    parser.add_argument("--json", type=Path, help="write the rows and where they come from")
    parser.add_argument("--svg", type=Path, help="write a plot of 1 − agreement by layer")
    return parser


def token_ids_of(options: argparse.Namespace) -> list[int]:
    """The tokens both sides read. Raises ``UserError``, also for none and for too many of them."""
    config = ModelConfig.from_folder(options.model)
    if options.random_tokens is None:
        check_unicode(options.prompt, "--prompt")
        ids = load_tokenizer(options.model, config).encode(options.prompt)
        _check_length("--prompt", len(ids), config)
        return ids
    # Before they are drawn: the memory would not hold what a mistyped number asks for.
    _check_length("--random-tokens", options.random_tokens, config)
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (options.random_tokens,), generator=seeded).tolist()


def _check_length(flag: str, tokens: int, config: ModelConfig) -> None:
    if not 0 < tokens <= config.max_position_embeddings:
        expected = f"1 to {config.max_position_embeddings} (max_position_embeddings)"
        raise UserError(f"{flag}: found {tokens} tokens, expected {expected}")


def engine_config(options: argparse.Namespace, tokens: int) -> EngineConfig:
    """The configuration of our side for a sequence of that length."""
    return EngineConfig(
        device=options.device,
        gpus=options.gpus,
        parallel=options.parallel,
        ops=options.ops,
        kv_dtype=options.kv_dtype,
        compute_dtype=options.compute_dtype,
        max_context=tokens,
        prefill_chunk=options.chunk,
        cuda_graph=options.cuda_graph,
        prefill_activations=options.prefill_activations,
        draft="off",
    )


def run(options: argparse.Namespace) -> Report:
    """Both traces and their comparison."""
    token_ids = token_ids_of(options)
    config = engine_config(options, len(token_ids))
    found, kinds = engine_trace(options.model, token_ids, config, parse_swaps(options.swap))
    if options.reference == "transformers":
        reference = transformers_trace(options.model, token_ids)
    else:
        torch_config = replace(
            config,
            device=options.reference_device,
            gpus=1,
            parallel="pipeline",
            ops="torch",
            prefill_chunk=DEFAULT_CHUNK,
            cuda_graph=None,
            prefill_activations="bf16",
        )
        reference, _ = engine_trace(options.model, token_ids, torch_config, {})
    rows = compare(found, reference, kinds, options.threshold)
    ours, theirs = ([int(row.argmax()) for row in side["logits"]] for side in (found, reference))
    same = ours == theirs
    return Report(
        f"{table(rows)}\nsame argmax at every token: {'yes' if same else 'no'}",
        {
            "tokens": len(token_ids),
            "same_argmax_at_every_token": same,
            "rows": [asdict(row) for row in rows],
        },
        [_point(row.name, row) for row in rows],
        all(row.passes for row in rows),
    )


def _point(column: str, row: Agreement) -> Point:
    return Point(column, row.name, row.kind, row.worst_token, row.cosine, row.passes)


def run_against(options: argparse.Namespace) -> Report:
    """Their trace files with ours."""

    def write(token_ids: list[int], names: Sequence[str], path: Path) -> None:
        config = engine_config(options, len(token_ids))
        swaps = parse_swaps(options.swap)
        write_engine_trace(path, options.model, token_ids, config, swaps, names)

    found = compare_files(options.against, options.trace, options.model, write, options.threshold)
    points = [_point(column_of(row.name), row) for row in found.rows if row.worst_at is not None]
    return Report(found.text(), found.facts(), points, found.passes)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for a combination that would be ignored and for a file
    that cannot be written.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    given = given_flags(parser, options)
    if "prompt" in given and options.random_tokens is not None:
        raise UserError("--prompt: found together with --random-tokens, which replaces it")
    if "reference_device" in given and options.reference == "transformers":
        raise UserError("--reference-device: found with transformers, which runs on the CPU")
    if options.parallel == "tensor" and options.swap:
        found = f"{options.swap[0]!r} with --parallel tensor, whose ops exchange partial results"
        raise UserError(f"--swap: found {found}")
    refuse_unused(options, given)
    check_reference_device(options.reference_device)
    read = [("--against", path) for path in options.against or ()]
    check_outputs(options, [*read, ("--trace", options.trace)])
    return options


def refuse_unused(options: argparse.Namespace, given: frozenset[str]) -> None:
    """Raises ``UserError`` for a flag that ``--against`` would not look at, or only it would."""
    if options.against is None:
        unused = ["trace"]
        reason = "found without --against"
    else:
        unused = ["prompt", "random_tokens", "reference", "reference_device"]
        reason = "found with --against, whose files say what is compared"
        if options.trace is not None:
            unused += ["model", "device", "gpus", "parallel", "ops", "chunk", "cuda_graph", "swap"]
            unused += ["kv_dtype", "compute_dtype", "prefill_activations"]
            reason = "found with --against and --trace, which say what is compared"
    for name in unused:
        if name in given:
            raise UserError(f"--{name.replace('_', '-')}: {reason}")


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a token is under the threshold."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    report = run(options) if options.against is None else run_against(options)
    try:
        print(report.text)
    finally:  # Whoever reads stdout may have left.
        write_record(options.json, "dsv4.validate.cosine", arguments, report.facts)
        if options.svg is not None:
            write_output("--svg", options.svg, cosine_svg(report.points, options.threshold))
    return 0 if report.passes else 1


if __name__ == "__main__":
    run_program(main)
