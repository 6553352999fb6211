"""The driver's flags: parsing, ranges, and the two configurations made of them."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError

DEFAULT_PROMPT = "What is the capital of France?"
DEFAULT_MAX_TOKENS = 512


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag as a ``UserError`` in one line instead of printing the usage and
    leaving.
    """

    def error(self, message: str) -> NoReturn:
        """Raises ``UserError`` with argparse's message, without its leading word."""
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A flag type: an integer from ``low`` to ``high`` (``None``: unbounded)."""
    expected = f"an integer from {low}" + ("" if high is None else f" to {high}")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return parse


def number(low: float, high: float, low_included: bool = True) -> Callable[[str], float]:
    """A flag type: a finite number from ``low`` (or above it) to ``high``."""
    expected = f"a number {'from' if low_included else 'above'} {low:g}" + (
        f" to {high:g}" if high < math.inf else ""
    )

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if (
            not math.isfinite(value)
            or not low <= value <= high
            or (value == low and not low_included)
        ):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return parse


def build_parser() -> OneLineParser:
    """The parser with every flag of the driver."""
    parser = OneLineParser(
        prog="single_shot_inference.py",
        description=(
            "Loads a DeepSeek-V4 checkpoint, reads a prompt and streams the answer to stdout."
        ),
        allow_abbrev=False,
    )
    add_prompt_flags(parser.add_argument_group("prompt"))
    add_sampling_flags(parser.add_argument_group("sampling"))
    add_engine_flags(parser.add_argument_group("engine"))
    add_output_flags(parser.add_argument_group("output"))
    return parser


def add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the prompt."""
    sources = group.add_mutually_exclusive_group()
    sources.add_argument(
        "--prompt", metavar="TEXT", help=f"the user's message (default: {DEFAULT_PROMPT!r})"
    )
    sources.add_argument(
        "--prompt-file", metavar="FILE", help="the user's message from a UTF-8 file; - is stdin"
    )
    sources.add_argument(
        "--messages", metavar="FILE", help="a conversation: OpenAI-style messages, tools included"
    )
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    group.add_argument(
        "--thinking",
        choices=("off", "on"),
        default="off",
        help="reason before answering (default off)",
    )
    group.add_argument(
        "--reasoning-effort", choices=("low", "high", "max"), help="with --thinking on"
    )
    group.add_argument(
        "--raw", action="store_true", help="the prompt is plain text: no chat encoding, no parsing"
    )


def add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    """How tokens are chosen; what is not given comes from generation_config.json."""
    group.add_argument(
        "--max-tokens",
        type=integer(1),
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="at most N tokens",
    )
    group.add_argument("--temperature", type=number(0, math.inf), metavar="X", help="0 is greedy")
    group.add_argument(
        "--top-p", type=number(0, 1, low_included=False), metavar="X", help="nucleus, 1 is off"
    )
    group.add_argument(
        "--min-p", type=number(0, 1), metavar="X", help="minimum relative to the best, 0 is off"
    )
    group.add_argument(
        "--seed", type=integer(0, 2**63 - 1), metavar="N", help="makes sampling repeatable"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-sequence token"
    )


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the engine and its devices."""
    group.add_argument(
        "--model", type=Path, default=CHECKPOINT, metavar="PATH", help="a Hugging Face folder"
    )
    group.add_argument(
        "--max-context",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="prompt and answer together, in tokens",
    )
    group.add_argument(
        "--prefill-chunk", type=integer(1, 65536), metavar="N", help="tokens per forward"
    )
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: cuda where there is one",
    )
    group.add_argument(
        "--gpus",
        type=integer(1, 8),
        default=1,
        metavar="N",
        help="devices to spread the model over",
    )
    group.add_argument(
        "--parallel",
        choices=("pipeline", "round-robin", "tensor"),
        default="pipeline",
        help="contiguous layers balanced by bytes (default), or layer l on device l mod N",
    )
    group.add_argument(
        "--ops",
        choices=("auto", "torch", "cuda"),
        default="auto",
        help="the op table; auto: cuda on a CUDA device",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("fp8", "bf16"),
        default="fp8",
        help="what the caches hold (default fp8)",
    )
    group.add_argument(
        "--cuda-graph",
        nargs="?",
        choices=("auto", "split", "full"),
        const="auto",
        help=(
            "decode by replaying captured graphs; "
            "auto: the faster mode that reproduces the eager step"
        ),
    )
    group.add_argument("--plan", action="store_true", help="print the memory plan and stop")


def add_output_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the output other than the text."""
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write texts, token ids, timings and configuration",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="time every op, or every kernel of a graph; a table on stderr",
    )
    group.add_argument("--quiet", action="store_true", help="nothing but the text")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses ``argv`` (``None``: the process's own). Raises ``UserError`` for a wrong flag or
    combination.
    """
    arguments = build_parser().parse_args(argv)
    chat_only = {
        "--messages": arguments.messages is not None,
        "--system": arguments.system is not None,
        "--thinking on": arguments.thinking == "on",
        "--reasoning-effort": arguments.reasoning_effort is not None,
    }
    for flag, given in chat_only.items():
        if arguments.raw and given:
            raise UserError(f"--raw: found together with {flag}, which needs the chat encoding")
    if arguments.reasoning_effort is not None and arguments.thinking == "off":
        raise UserError("--reasoning-effort: found with thinking off, expected --thinking on")
    if arguments.system is not None and arguments.messages is not None:
        raise UserError(
            "--system: found together with --messages, which holds its own system message"
        )
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        raise UserError(f"--json: {arguments.json}: its folder does not exist")
    if arguments.json is not None and arguments.json.is_dir():
        raise UserError(f"--json: {arguments.json}: found a folder, expected a file name")
    return arguments


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The part of the flags that the engine takes."""
    return EngineConfig(
        device=arguments.device,
        gpus=arguments.gpus,
        parallel=arguments.parallel,
        kv_dtype=arguments.kv_dtype,
        max_context=arguments.max_context,
        prefill_chunk=arguments.prefill_chunk,
        ops=arguments.ops,
        cuda_graph=arguments.cuda_graph,
    )
