"""The flags of ``dsv4 serve``."""

import argparse
from collections.abc import Sequence

from dsv4.cli.flags import add_computation_flags, add_engine_flags
from dsv4.command.flags import OneLineParser, given_flags, integer, path
from dsv4.errors import UserError


def build_parser() -> OneLineParser:
    """The parser with every flag."""
    parser = OneLineParser(
        prog="dsv4 serve",
        description=(
            "Loads a DeepSeek-V4 checkpoint and answers OpenAI-compatible requests, one at a time."
        ),
        epilog="docs/serve.md says which fields of requests are supported.",
    )
    add_serving_flags(parser.add_argument_group("serving"))
    add_engine_flags(parser.add_argument_group("engine"))
    add_computation_flags(parser.add_argument_group("computation"))
    output = parser.add_argument_group("output")
    output.add_argument("--verbose", action="store_true", help="a line for every request")
    output.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def add_serving_flags(group: argparse._ArgumentGroup) -> None:
    """Where requests come from and how many may wait."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="name or address to listen on (default: %(default)s)",
    )
    group.add_argument(
        "--port",
        type=integer(0, 65535),
        default=8000,
        metavar="N",
        help="0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        type=path,
        metavar="FILE",
        help="clients need the key in this file, - is stdin; a --host that others reach needs one "
        "(default: none)",
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="what requests call it (default: the folder's name)"
    )
    group.add_argument(
        "--thinking",
        choices=("off", "on"),
        default="off",
        help="reason before answering, where a request does not say (default: off)",
    )
    group.add_argument(
        "--queue",
        type=integer(0, 1000),
        default=16,
        metavar="N",
        help="requests that may wait; more are refused (default: %(default)s)",
    )
    group.add_argument(
        "--max-body",
        type=integer(1, 1000),
        default=32,
        metavar="MB",
        help="largest request, in 10^6 bytes (default: %(default)s)",
    )
    group.add_argument(
        "--state-dir",
        type=path,
        metavar="DIR",
        help="keep the states of conversations that others interrupt (default: none)",
    )
    group.add_argument(
        "--states",
        type=integer(2, 1000),
        default=4,
        metavar="N",
        help="at most N files in --state-dir (default: %(default)s)",
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Raises ``UserError``."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    given = given_flags(parser, arguments)
    if arguments.model_name == "":
        raise UserError("--model-name: found '', expected a name")
    if "states" in given and arguments.state_dir is None:
        raise UserError("--states: found without --state-dir, expected both")
    if arguments.gpus == 1 and "parallel" in given:
        raise UserError("--parallel: found with one device, expected --gpus 2 to 8")
    if arguments.verbose and arguments.quiet:
        raise UserError("--verbose: found together with --quiet, expected one of them")
    return arguments
