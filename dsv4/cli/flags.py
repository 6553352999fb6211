"""The driver's flags: names, ranges, defaults and what ``--help`` says of them."""

import argparse
import math

import dsv4
from dsv4.cli.chat.flags import add_chat_flags
from dsv4.cli.draft_flags import add_draft_flags
from dsv4.cli.plan_flags import add_plan_flags
from dsv4.cli.prompts.flags import add_answers_flags, add_prompts_flag
from dsv4.cli.state_flags import add_load_state_flag, add_save_state_flag
from dsv4.command.flags import OneLineParser, add_prefill_activations, integer, number, path
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import PARALLEL
from dsv4.limits import MAX_LOGPROBS, MAX_PREFILL_CHUNK

DEFAULT_PROMPT = "What is the capital of France?"
DEFAULT_MAX_TOKENS = 512
EXAMPLE = """example:
  single_shot_inference.py --model /models/DeepSeek-V4-Flash --gpus 2 --cuda-graph \\
      --thinking on --max-tokens 4096 --prompt "What is 29 + 27 - 4?" --json run.json

Every flag is explained in docs/driver.md."""


def build_parser() -> OneLineParser:
    """The parser with every flag of the driver."""
    parser = OneLineParser(
        prog="single_shot_inference.py",
        description=(
            "Loads a DeepSeek-V4 checkpoint, reads a prompt and streams the answer to stdout."
        ),
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsv4 {dsv4.__version__}")
    add_prompt_flags(parser.add_argument_group("prompt"))
    add_sampling_flags(parser.add_argument_group("sampling"))
    engine = parser.add_argument_group("engine")
    add_engine_flags(engine)
    add_plan_flags(engine)
    add_computation_flags(parser.add_argument_group("computation"))
    add_output_flags(parser.add_argument_group("output"))
    add_answers_flags(parser.add_argument_group("output of --prompts"))
    return parser


def add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the prompt."""
    sources = group.add_mutually_exclusive_group()
    sources.add_argument(
        "--prompt", metavar="TEXT", help=f"the user's message (default: {DEFAULT_PROMPT!r})"
    )
    sources.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="the user's message from a UTF-8 file, without one line break at its end; - is stdin "
        "(default: --prompt)",
    )
    sources.add_argument(
        "--messages",
        metavar="FILE",
        help="a conversation: OpenAI-style messages, tools included; - is stdin "
        "(default: --prompt)",
    )
    sources.add_argument(
        "--token-ids",
        metavar="FILE",
        help="the prompt as token ids, a JSON array or numbers between spaces or commas; "
        "- is stdin; no chat encoding, no parsing (default: --prompt)",
    )
    add_prompts_flag(sources)
    add_load_state_flag(group)
    add_chat_flags(group)
    group.add_argument(
        "--system", metavar="TEXT", help="a system message before the prompt (default: none)"
    )
    group.add_argument(
        "--thinking",
        choices=("off", "on"),
        default="off",
        help="reason before answering (default: off)",
    )
    group.add_argument(
        "--reasoning-effort",
        choices=("low", "high", "max"),
        help="with --thinking on (default: the model's own)",
    )
    group.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="control tokens that a message quotes, such as <think>, stay control tokens "
        "(default: a zero-width space makes them text)",
    )
    group.add_argument(
        "--raw", action="store_true", help="the prompt is plain text: no chat encoding, no parsing"
    )


def stop_string(text: str) -> str:
    """A flag type: a string with characters, which a text can have."""
    if not text:
        raise argparse.ArgumentTypeError("found an empty string, expected some characters")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError("found bytes that are not UTF-8, expected characters")
    return text


def add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    """How tokens are chosen; what is not given comes from generation_config.json."""
    group.add_argument(
        "--max-tokens",
        type=integer(1),
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="at most N tokens (default: %(default)s)",
    )
    from_file = "(default: generation_config.json's, else"
    group.add_argument(
        "--temperature",
        type=number(0, math.inf),
        metavar="X",
        help=f"0 is greedy {from_file} 1)",
    )
    group.add_argument(
        "--top-k",
        type=integer(0),
        metavar="K",
        help=f"the K most likely, before top-p, 0 is off {from_file} 0)",
    )
    group.add_argument(
        "--top-p",
        type=number(0, 1, low_included=False),
        metavar="X",
        help=f"nucleus, 1 is off {from_file} 1)",
    )
    group.add_argument(
        "--min-p",
        type=number(0, 1),
        metavar="X",
        help=f"minimum relative to the best, 0 is off {from_file} 0)",
    )
    group.add_argument(
        "--seed",
        type=integer(0, 2**63 - 1),
        metavar="N",
        help="makes sampling repeatable (default: drawn, and recorded by --json)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        type=stop_string,
        metavar="STRING",
        help="end before this string, also across tokens; may be given several times "
        "(default: none)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-sequence token"
    )


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the engine and its devices."""
    group.add_argument(
        "--model",
        type=path,
        default=CHECKPOINT,
        metavar="PATH",
        help="a Hugging Face folder (default: the embedded demo)",
    )
    add_draft_flags(group)
    group.add_argument(
        "--packed-cache",
        type=path,
        metavar="DIR",
        help="keep packed weights there, so that the next start packs nothing (default: none)",
    )
    group.add_argument(
        "--max-context",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="prompt and answer together, in tokens "
        "(default: 8192, or what a run needs, at most the model's)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=integer(1, MAX_PREFILL_CHUNK),
        metavar="N",
        help="tokens per forward (default: 4096 on one GPU, up to 2048 on several, 8192 with "
        "--parallel tensor, 512 on the CPU)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: cuda where there is one (default: auto)",
    )
    group.add_argument(
        "--gpus",
        type=integer(1, 8),
        default=1,
        metavar="N",
        help="devices to spread the model over (default: 1)",
    )
    group.add_argument(
        "--parallel",
        choices=PARALLEL,
        default="pipeline",
        help="contiguous layers balanced by bytes, layer l on device l mod N, or a part of every "
        "layer on each of 2, 4 or 8 GPUs (default: pipeline)",
    )


def add_computation_flags(group: argparse._ArgumentGroup) -> None:
    """With which kernels and in which precision the engine computes and remembers."""
    group.add_argument(
        "--ops",
        choices=("auto", "torch", "cuda"),
        default="auto",
        help="the op table; auto: cuda on a CUDA device in bfloat16, with native kernels where "
        "they have passed their checks, else torch (default: auto)",
    )
    group.add_argument(
        "--require-native",
        action="store_true",
        help="with --ops auto: an error where native kernels are not used "
        "(default: a warning, and the portable kernels)",
    )
    group.add_argument(
        "--cuda-graph",
        nargs="?",
        choices=("auto", "split", "full"),
        const="auto",
        help="decode by replaying captured graphs; auto, also without a value: the faster mode "
        "that reproduces the eager step (default: eager steps)",
    )
    group.add_argument(
        "--compute-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what is computed in; float32 takes the torch ops (default: bfloat16)",
    )
    add_prefill_activations(group)
    group.add_argument(
        "--kv-dtype",
        choices=("fp8", "bf16"),
        default="fp8",
        help="what the caches hold; bf16: not quantised, in the compute dtype (default: fp8)",
    )
    group.add_argument(
        "--index-dtype",
        choices=("fp8", "bf16"),
        help="what the caches of the indexer hold (default: as --kv-dtype)",
    )


def add_output_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the output other than the text."""
    group.add_argument(
        "--json",
        type=path,
        metavar="FILE",
        help="write texts, token ids, timings and configuration; - is stdout, after the text "
        "(default: none)",
    )
    group.add_argument(
        "--logprobs",
        type=integer(0, MAX_LOGPROBS),
        metavar="N",
        help="with --json: the log-probability of every token and of the N most likely ones "
        "(default: none)",
    )
    add_save_state_flag(group)
    group.add_argument(
        "--trace",
        type=path,
        metavar="FILE",
        help="the values inside every layer as safetensors, docs/traces.md (default: none)",
    )
    group.add_argument(
        "--trace-at",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only values of such names, e.g. 'layers.3.*'; repeatable (default: all)",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="time every op, or every kernel of a graph; a table on stderr",
    )
    group.add_argument(
        "--verbose", action="store_true", help="log lines on stderr in place of progress bars"
    )
    group.add_argument("--quiet", action="store_true", help="of stderr only warnings and errors")
