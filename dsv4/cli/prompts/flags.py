"""The flags of ``--prompts`` and what cannot stand beside them."""

import argparse
import sys
from importlib.util import find_spec

from dsv4.command.flags import integer, path
from dsv4.errors import UserError


def add_prompts_flag(sources: argparse._ActionsContainer) -> None:
    """``--prompts``, one of the ``sources`` of prompts."""
    sources.add_argument(
        "--prompts",
        metavar="FILE",
        help="many prompts, a JSON object with prompt or messages and settings in every line; "
        "- is stdin; with --out (default: --prompt)",
    )


def add_answers_flags(group: argparse._ArgumentGroup) -> None:
    """Where the answers to ``--prompts`` go, and what they hold."""
    group.add_argument(
        "--out",
        type=path,
        metavar="FILE",
        help="every answer as a line of JSON; lines that are there already are not asked again "
        "(default: none)",
    )
    group.add_argument(
        "--with-token-ids",
        action="store_true",
        help="answers hold the prompt as the model got it, and token ids",
    )
    group.add_argument(
        "--ray",
        type=integer(0, 10000),
        nargs="?",
        const=0,
        metavar="N",
        help="on N workers of a Ray cluster with an engine each; 0, also without a value: as many "
        "as its GPUs hold, or one a node (default: in this process)",
    )


def check_prompts_flags(arguments: argparse.Namespace) -> None:
    """Raises ``UserError`` for flags that many prompts need or cannot have."""
    if arguments.prompts is None:
        for flag, given in (
            ("--out", arguments.out is not None),
            ("--with-token-ids", arguments.with_token_ids),
            ("--ray", arguments.ray is not None),
        ):
            if given:
                raise UserError(f"{flag}: found without --prompts, expected both")
        return
    if arguments.ray is not None and find_spec("ray") is None:
        raise UserError(f"--ray: {sys.executable} has no ray, expected it: pip install 'dsv4[ray]'")
    if arguments.out is None:
        raise UserError("--prompts: found without --out, expected both")
    of_one_prompt = {
        "--json": arguments.json is not None,
        "--trace": arguments.trace is not None,
        "--trace-at": bool(arguments.trace_at),
        "--profile": arguments.profile,
        "--plan": arguments.plan,
        "--save-state": arguments.save_state is not None,
        "--load-state": arguments.load_state is not None,
        "--tools": arguments.tools is not None,
    }
    for flag, given in of_one_prompt.items():
        if given:
            raise UserError(f"{flag}: found together with --prompts, expected a single prompt")
